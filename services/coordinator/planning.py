"""Planning of a model's stages: takes statistics of lengths and publishes the next plan.

Owns, per model whose lease is held: the lengths of the last arrivals, the layout that was decided, and the
stage in which each instance served. The coordinator owns the plan in force. A policy (libs/millrace/policies/stages)
decides layouts at the first tick and once a period. Changes of membership apply at once and move no other instance.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import msgspec
from millrace.actor.effects import Effect, Log
from millrace.contracts.observers import DecisionMade, RequestFinished
from millrace.contracts.plan import InstanceRole, Plan, Stage
from millrace.contracts.status import InstanceRecord, InstanceSummary
from millrace.enginemodel.registered import scheduler_parameters
from millrace.enginemodel.step_time_models import StepTimeModel
from millrace.policies.stages import PlanningView, StageDecision, StageShape, assign, stages_of
from millrace.policies.stages.cohort import ARRIVALS_MAX, ArrivalCohort
from millrace.policies.stages.fixed import policy as fixed
from millrace.policies.stages.instance import InstanceModel, linear_instance
from millrace.policies.stages.statistics import LengthStatistics

from services.coordinator.config import StagesConfig, stage_policy

#: Stages in which instances served are remembered for so many instances of a model; beyond, returning ones go where
#: most are missing.
HOMES_MAX = 10_000


#: Kinds of instances whose linear costs are kept; a fit takes 3 ms.
INSTANCE_MODELS_MAX = 256


@dataclass
class ModelPlanning:
    """One model.

    Attributes:
        cohort: The last arrivals and their lengths.
        totals: Output tokens and running sequences that an instance told last, by its name and incarnation.
        made: Output tokens since the last tick.
        decision: The last one of the policy; None before the first.
        due_ns: When the policy is asked again; 0 for at once.
        homes: Instance -> index of its stage in the present layout.
    """

    cohort: ArrivalCohort = field(default_factory=ArrivalCohort)
    totals: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    made: int = 0
    decision: StageDecision | None = None
    due_ns: int = 0
    homes: dict[str, int] = field(default_factory=dict)

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


class Planning:
    """Decides stages; sole owner of what is known of lengths."""

    def __init__(
        self,
        config: StagesConfig,
        *,
        name: str,
        step_times: Mapping[str, StepTimeModel] | None = None,
    ) -> None:
        """Takes the models that were read from files.

        Args:
            config: Policy, its parameters and its periods.
            name: Author of the plans.
            step_times: Step-time models by the name in instance records.

        Raises:
            ConfigError: the policy or its parameters are wrong.
        """
        self._config = config
        self._name = name
        self._step_times = step_times or {}
        self._policy, self._parameters = stage_policy(config)
        self._models: dict[str, ModelPlanning] = {}
        self._instance_models: dict[tuple[str, int, int, int, int], InstanceModel | None] = {}

    @property
    def learns(self) -> bool:
        """Whether outcomes are needed."""
        return self._policy.learns

    @property
    def copy_bytes_per_s(self) -> float:
        """Bandwidth of one KV transfer between two instances."""
        return self._config.copy_bytes_per_s

    def on_decision(self, body: DecisionMade, now_ns: int) -> None:
        """Notes an arrival; of a model that is not led here, nothing."""
        known = self._models.get(body.model)
        if known is not None and self.learns and body.chosen and body.kind == "dispatch":
            choices, tokens_max = len(body.sequences), body.max_tokens
            known.cohort.arrive(
                body.request, prompt=body.prompt_tokens, max_tokens=tokens_max, choices=choices, now_ns=now_ns
            )

    def on_outcome(self, body: RequestFinished) -> None:
        """Notes the lengths of a request that ended; of a model that is not led here, nothing."""
        known = self._models.get(body.model)
        if known is not None and self.learns:
            known.cohort.end(body.request, outputs=tuple(body.output_tokens), cached=body.cached_tokens)

    def on_summary(self, body: InstanceSummary) -> None:
        """Notes how much an instance has generated."""
        known = self._models.get(body.model)
        if known is not None and self.learns:
            known.note(body)

    def forget(self, model: str) -> None:
        """Drops what is known of a model whose lease is somebody else's."""
        self._models.pop(model, None)

    def tick(self, model: str, plan: Plan | None, records: Sequence[InstanceRecord], now_ns: int) -> list[Effect]:
        """Asks the policy about one led model where it is time to.

        Args:
            model: Its name.
            plan: In force; None for none.
            records: Of the instances that serve.
            now_ns: Unix ns.
        """
        known = self._models.setdefault(model, ModelPlanning())
        known.advance({record.instance for record in records})
        if now_ns < known.due_ns:
            return []
        known.due_ns = now_ns + round(self._config.period_s * 1e9)
        before = known.decision
        known.decision = self._decide(model, known, plan, records, now_ns)
        if before is not None and before.reason == known.decision.reason:
            return []
        shapes = [[s.length_min, s.instances] for s in known.decision.shapes]
        fields = {"model": model, "policy": self._config.policy, "stages": shapes, "reason": known.decision.reason}
        return [Log(level="info", event="stages_decided", fields=fields)]

    def _decide(
        self, model: str, known: ModelPlanning, plan: Plan | None, records: Sequence[InstanceRecord], now_ns: int
    ) -> StageDecision:
        view = PlanningView(
            instances=len(records),
            statistics=self._statistics(known, now_ns) if self.learns else None,
            instance=self._instance(records) if self.learns else None,
            current=_layout(plan),
        )
        ranges = self._config.ranges.get(model)
        if ranges:
            return fixed.decide(view, fixed.Parameters(ranges=tuple(ranges)))
        return self._policy.decide(view, self._parameters)

    def next_plan(
        self,
        model: str,
        plan: Plan | None,
        records: Sequence[InstanceRecord],
        now_ns: int,
        *,
        roles: Callable[[Sequence[str]], Mapping[str, InstanceRole]],
    ) -> Plan | None:
        """Writes down the decided layout with the instances that serve now.

        Args:
            model: Its name.
            plan: In force; None for none.
            records: Of the instances that serve.
            now_ns: Unix ns.
            roles: Gives the roles of a stage's instances.

        Returns:
            The new plan; None where the plan in force says the same.
        """
        known = self._models.setdefault(model, ModelPlanning())
        if known.decision is None or not self.learns:
            known.decision = self._decide(model, known, plan, records, now_ns)
        shapes = known.decision.shapes
        before = plan.stages if plan is not None else []
        same_cuts = plan is not None and plan.cuts == [shape.length_min for shape in shapes[1:]]
        if not same_cuts:
            known.homes.clear()
        names = [record.instance for record in records]
        members = assign(
            shapes,
            names,
            previous=before,
            homes=known.homes,
            hosts={record.instance: record.host for record in records},
            pins=self._pins(model, names),
        )
        self._remember(known, members)
        stages = stages_of(shapes, members, {n: r for each in members for n, r in roles(each).items()})
        if stages == before:
            return None
        return self._written(model, plan, stages, known.decision, same_cuts=same_cuts)

    def _written(
        self, model: str, plan: Plan | None, stages: list[Stage], decision: StageDecision, *, same_cuts: bool
    ) -> Plan:
        epoch = plan.epoch + 1 if plan is not None else 1
        return Plan(
            model=model,
            epoch=epoch,
            stages=stages,
            coordinator=self._name,
            boundary_epoch=plan.boundary_epoch if plan is not None and same_cuts else epoch,
            policy="fixed" if model in self._config.ranges else self._config.policy,
            reason=_change(plan, stages) if same_cuts else decision.reason,
            expects=decision.expects,
        )

    def _remember(self, known: ModelPlanning, members: Sequence[Sequence[str]]) -> None:
        for index, names in enumerate(members):
            for name in names:
                if name in known.homes or len(known.homes) < HOMES_MAX:
                    known.homes[name] = index

    def _pins(self, model: str, names: Iterable[str]) -> dict[str, int]:
        """Instances that the configuration gives to a stage: the first one that names them."""
        pins: dict[str, int] = {}
        for index, each in enumerate(self._config.ranges.get(model, ())):
            for name in names:
                if name not in pins and any(fnmatchcase(name, pattern) for pattern in each.members):
                    pins[name] = index
        return pins

    def _statistics(self, known: ModelPlanning, now_ns: int) -> LengthStatistics | None:
        known.cohort.forget(now_ns - round(self._config.window_s * 1e9))
        return known.cohort.statistics(now_ns)

    def _instance(self, records: Sequence[InstanceRecord]) -> InstanceModel | None:
        """The slowest of the instances by its fixed cost, with the smallest memory; None where one is unknown."""
        found = [self.instance_model(record) for record in records]
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

    def instance_model(self, record: InstanceRecord) -> InstanceModel | None:
        """Step costs and memory of an instance; None where its step time is unknown, or no engine has such limits."""
        key = (record.step_time, record.blocks_total, record.block_size, record.max_sequences, record.token_budget)
        if key not in self._instance_models and len(self._instance_models) < INSTANCE_MODELS_MAX:
            self._instance_models[key] = _instance_model(record, self._step_times.get(record.step_time))
        return self._instance_models.get(key)

    def snapshot(self) -> dict[str, Any]:
        """Requests known and the last decision, by model."""
        return {
            model: {"requests": len(known.cohort.arrived), "reason": known.decision.reason if known.decision else ""}
            for model, known in sorted(self._models.items())
        }

    def check(self) -> None:
        """Raises AssertionError where a bound does not hold."""
        for known in self._models.values():
            assert len(known.cohort.open) <= len(known.cohort.arrived) <= ARRIVALS_MAX
            assert len(known.homes) <= HOMES_MAX


def _instance_model(record: InstanceRecord, step_time: StepTimeModel | None) -> InstanceModel | None:
    if step_time is None:
        return None
    try:
        parameters = scheduler_parameters(record)
    except ValueError:
        return None  # no engine could run with what the record says
    made = linear_instance(
        step_time.cost(parameters),
        kv_tokens=record.block_size * record.blocks_total,
        max_sequences=record.max_sequences,
        token_budget=record.token_budget,
    )
    if record.kv is None:
        return made
    return msgspec.structs.replace(made, kv_bytes_per_token=record.kv.block_bytes / max(1, record.kv.block_tokens))


def _layout(plan: Plan | None) -> tuple[StageShape, ...]:
    """Layout of the plan in force; of a plan that tells no numbers of instances, those that it has."""
    if plan is None:
        return ()
    return tuple(
        StageShape(
            length_min=stage.length_min,
            length_max=stage.length_max,
            instances=max(1, stage.instances_wanted or len(stage.instances)),
        )
        for stage in plan.stages
    )


def _change(plan: Plan | None, stages: Sequence[Stage]) -> str:
    """Human-readable list of the instances that joined and left."""
    before = {name for stage in plan.stages for name in stage.instances} if plan is not None else set()
    now = {name for stage in stages for name in stage.instances}
    joined, left = sorted(now - before), sorted(before - now)
    told = [
        f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''} {verb}"
        for names, verb in ((joined, "joined"), (left, "left"))
        if names
    ]
    return ", ".join(told) or "instances or roles changed"


def rewritten(plan: Plan, coordinator: str) -> Plan:
    """The plan in force under a new epoch, for a store that lost it."""
    told = {"epoch": plan.epoch + 1, "coordinator": coordinator, "reason": "the store lost the plan"}
    return msgspec.structs.replace(plan, **told)


def written(plan: Plan) -> Effect:
    """Log line of a plan that is written."""
    count = sum(len(stage.instances) for stage in plan.stages)
    fields = {"model": plan.model, "epoch": plan.epoch, "instances": count, "cuts": plan.cuts, "reason": plan.reason}
    return Log(level="info", event="plan_written", fields=fields)


def no_prefill_instance(plan: Plan, before: list[str]) -> tuple[list[Effect], list[str]]:
    """Warns when all instances of a stage only decode, which have to prefill as well then; once until that is over.

    Args:
        plan: That is written.
        before: Stages of which that was said.
    """
    stages = [stage.name for stage in plan.stages if _only_decode(stage)]
    if not stages or stages == before:
        return [], stages
    return [Log(level="warning", event="no_prefill_instance", fields={"model": plan.model, "stages": stages})], stages


def _only_decode(stage: Stage) -> bool:
    return bool(stage.instances) and all(stage.roles.get(n) is InstanceRole.DECODE for n in stage.instances)
