"""Stages: learns how long requests are, and proposes which ranges of lengths a model's plan shall have.

An actor of its own, hosted in the coordinator's process. Owns, per model that is led, the lengths of the last arrivals
and the layout that was decided. A policy (libs/millrace/policies/stages) decides at the first tick and once a period.

| message in | change | messages out |
|---|---|---|
| DecisionMade, RequestFinished, InstanceSummary | arrivals, their lengths, tokens that were generated | |
| KeyChanged(lease / plan), TimerFired(tick) | the policy is asked once a period | PlanProposed where it decides anew |
| StopRequested | | Stop |

Overload: ARRIVALS_MAX requests of each model are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import msgspec
from millrace.actor.effects import Effect, Log
from millrace.contracts.local import KeyChanged
from millrace.contracts.message import Body
from millrace.contracts.observers import DecisionMade, RequestFinished
from millrace.contracts.plan import Plan, Stage
from millrace.contracts.status import InstanceRecord, InstanceSummary
from millrace.policies.stages import STAGE_POLICIES, PlanningView, StageDecision, StageShape
from millrace.policies.stages.cohort import ARRIVALS_MAX, ArrivalCohort
from millrace.policies.stages.fixed import policy as fixed
from millrace.policies.stages.instance import InstanceModel
from millrace.policies.stages.statistics import LengthStatistics

from services.coordinator.config import CoordinatorConfig
from services.coordinator.led_models import Controller


@dataclass
class ModelLengths:
    """One model.

    Attributes:
        cohort: The last arrivals and their lengths.
        totals: Output tokens and running sequences that an instance told last, by its name and incarnation.
        made: Output tokens since the last tick.
        decision: The last one of the policy; None before the first.
        due_ns: When the policy is asked again; 0 for at once.
    """

    cohort: ArrivalCohort = field(default_factory=ArrivalCohort)
    totals: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    made: int = 0
    decision: StageDecision | None = None
    due_ns: int = 0

    def note(self, body: InstanceSummary) -> None:
        """Takes what an instance has generated; one that was started anew begins at 0."""
        incarnation, before, _ = self.totals.get(body.instance, (body.incarnation, body.output_tokens_total, 0))
        if incarnation == body.incarnation:
            self.made += max(0, body.output_tokens_total - before)
        self.totals[body.instance] = (body.incarnation, body.output_tokens_total, max(0, body.running))

    def advance(self, serving: Collection[str]) -> None:
        """Let running sequences get on by what was generated since the last time."""
        self.totals = {name: told for name, told in self.totals.items() if name in serving}
        running = sum(told[2] for told in self.totals.values())
        self.cohort.progress(self.made / max(1, running))
        self.made = 0


class StagesActor(Controller):
    """Decides layouts of models that are led here."""

    def __init__(
        self,
        config: CoordinatorConfig,
        *,
        incarnation: int,
        instance_model: Callable[[InstanceRecord], InstanceModel | None],
    ) -> None:
        """Raises ConfigError where the policy or its parameters are wrong."""
        super().__init__(config, by="stages", incarnation=incarnation)
        self._config = config.stages
        self._policy, self._parameters = STAGE_POLICIES.choose(
            config.stages.policy, config.stages.parameters, table="stages."
        )
        self._instance_model = instance_model
        self._models: dict[str, ModelLengths] = {}

    def _hears(self) -> list[str]:
        subjects = [self._subjects.summaries(), self._subjects.decisions(), self._subjects.outcomes()]
        return subjects if self._policy.learns else []

    def _on(self, body: Body, reply_to: str, now_ns: int) -> list[Effect]:
        match body:
            case InstanceSummary() as body:
                if (known := self._models.get(body.model)) is not None and self._led.on_summary(body) is not None:
                    known.note(body)
            case DecisionMade() as body:
                self._on_decision(body, now_ns)
            case RequestFinished() as body:
                if (known := self._models.get(body.model)) is not None:
                    known.cohort.end(body.request, outputs=tuple(body.output_tokens), cached=body.cached_tokens)
            case KeyChanged() as body:
                model = self._led.on_key(body, now_ns)
                return self._look(model, now_ns) if body.bucket != "instance" else []
        return []

    def _on_decision(self, body: DecisionMade, now_ns: int) -> None:
        known = self._models.get(body.model)
        if known is not None and body.chosen and body.kind == "dispatch":
            choices, tokens_max = len(body.sequences), body.max_tokens
            known.cohort.arrive(
                body.request, prompt=body.prompt_tokens, max_tokens=tokens_max, choices=choices, now_ns=now_ns
            )

    def _on_tick(self, now_ns: int) -> list[Effect]:
        effects: list[Effect] = []
        for model in self._led.led(now_ns):
            known = self._models.setdefault(model, ModelLengths())
            known.advance({record.instance for record in self._led.serving(model)})
            effects += self._look(model, now_ns)
        return effects

    def _look(self, model: str, now_ns: int) -> list[Effect]:
        """Asks the policy about a model where it is led and it is time to; proposes what is new."""
        if self._led.lost(model):
            self._models.pop(model, None)
        if not self._led.leads(model, now_ns):
            return []
        known = self._models.setdefault(model, ModelLengths())
        ranges = self._config.ranges.get(model)
        if self._policy.name == "one_stage" and not ranges:
            return []
        if now_ns < known.due_ns or (self._policy.learns and not ranges and self._led.plan(model) is None):
            return []
        known.due_ns = now_ns + round(self._config.period_s * 1e9)
        before, known.decision = known.decision, self._decide(model, known, now_ns)
        if before is not None and before == known.decision:
            return []
        decision = known.decision
        stages = [
            Stage(
                name=f"s{index}",
                length_min=shape.length_min,
                length_max=shape.length_max,
                instances=[],
                instances_wanted=shape.instances,
            )
            for index, shape in enumerate(decision.shapes)
        ]
        policy = "fixed" if ranges else self._policy.name
        shapes = [[s.length_min, s.instances] for s in decision.shapes]
        fields = {"model": model, "policy": policy, "stages": shapes, "reason": decision.reason}
        proposal = self._proposal(
            model, now_ns, stages=stages, policy=policy, reason=decision.reason, expects=decision.expects
        )
        same = before is not None and before.reason == decision.reason
        return [proposal] if same else [Log(level="info", event="stages_decided", fields=fields), proposal]

    def _decide(self, model: str, known: ModelLengths, now_ns: int) -> StageDecision:
        records, learns = self._led.serving(model), self._policy.learns
        view = PlanningView(
            instances=len(records),
            statistics=self._statistics(known, now_ns) if learns else None,
            instance=self._slowest(records) if learns else None,
            current=layout_of(self._led.plan(model)),
        )
        ranges = self._config.ranges.get(model)
        if ranges:
            return fixed.decide(view, fixed.Parameters(ranges=tuple(ranges)))
        return self._policy.decide(view, self._parameters)

    def _statistics(self, known: ModelLengths, now_ns: int) -> LengthStatistics | None:
        known.cohort.forget(now_ns - round(self._config.window_s * 1e9))
        return known.cohort.statistics(now_ns)

    def _slowest(self, records: list[InstanceRecord]) -> InstanceModel | None:
        """The slowest of the instances by its fixed cost, with the smallest memory; None where one is unknown."""
        found = [self._instance_model(record) for record in records]
        models = [model for model in found if model is not None]
        if not models or len(models) < len(records):
            return None
        slowest = max(models, key=lambda model: model.fixed_s)
        return msgspec.structs.replace(
            slowest,
            kv_tokens=min(model.kv_tokens for model in models),
            max_sequences=min(model.max_sequences for model in models),
            copy_bytes_per_s=self._config.copy_bytes_per_s,
        )

    def snapshot(self) -> dict[str, Any]:
        told = {
            model: {"requests": len(known.cohort.arrived), "reason": known.decision.reason if known.decision else ""}
            for model, known in sorted(self._models.items())
        }
        return {"planning": told}

    def check_invariants(self) -> None:
        for known in self._models.values():
            assert len(known.cohort.open) <= len(known.cohort.arrived) <= ARRIVALS_MAX


def layout_of(plan: Plan | None) -> tuple[StageShape, ...]:
    """Layout of the plan in force; of a plan that tells no numbers of instances, those that it has."""
    return tuple(
        StageShape(
            length_min=stage.length_min,
            length_max=stage.length_max,
            instances=max(1, stage.instances_wanted or len(stage.instances)),
        )
        for stage in (plan.stages if plan is not None else ())
    )
