"""Step bounds: orders smaller steps where prompts hold up decodes, for as long as they do.

An actor of its own, hosted in the coordinator's process. Owns the orders in force, by model. An order is a lease: it is
repeated with each tick and expires by itself at the worker, so that a coordinator that dies, or a message that is lost,
leaves no instance with a bound that nobody wants.

| message in | change | messages out |
|---|---|---|
| InstanceSummary, DecisionMade, RequestFinished | load of instances, prompts of new requests | |
| TimerFired(tick) | | SetStepBudget to each instance that has a bound, or had one |
| StopRequested | | Stop |

Overload: REQUESTS_MAX arrivals of each model are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
from millrace.actor.effects import Effect, Log, Publish
from millrace.contracts.local import KeyChanged
from millrace.contracts.message import Body
from millrace.contracts.observers import DecisionMade, RequestFinished
from millrace.contracts.plan import InstanceRole, Plan
from millrace.contracts.status import InstanceRecord, InstanceSummary
from millrace.contracts.worker import SetStepBudget
from millrace.policies.stages.instance import InstanceModel
from millrace.policies.step_bounds import StepLoad, step_bound

from services.coordinator.config import CoordinatorConfig
from services.coordinator.led_models import Controller

#: An order holds for so long without being repeated: five ticks.
VALID_MS = 5_000

#: Arrivals are looked at for so long, and summaries believed.
ARRIVALS_NS = 20_000_000_000
SUMMARY_NS = 5_000_000_000

#: Arrivals kept of one model, and requests that ended.
REQUESTS_MAX = 4096
ENDED_MAX = 256


class PlacedPrompt(msgspec.Struct, frozen=True, array_like=True):
    """One request when it was placed: unix ns, instance, prompt tokens."""

    at_ns: int
    instance: str
    prompt_tokens: int


class StepBoundsActor(Controller):
    """Bounds the steps of the instances of models that are led here."""

    def __init__(
        self,
        config: CoordinatorConfig,
        *,
        incarnation: int,
        instance_model: Callable[[InstanceRecord], InstanceModel | None],
    ) -> None:
        super().__init__(config, by="step_bounds", incarnation=incarnation)
        self._objectives = config.step_bounds
        self._instance_model = instance_model
        self._arrivals: dict[str, deque[PlacedPrompt]] = {}
        self._ended: dict[str, deque[tuple[int, int]]] = {}
        self._ordered: dict[str, dict[str, int]] = {}

    def _hears(self) -> list[str]:
        return [self._subjects.summaries(), self._subjects.decisions(), self._subjects.outcomes()]

    def _on(self, body: Body, reply_to: str, now_ns: int) -> list[Effect]:
        match body:
            case InstanceSummary() as body:
                self._led.on_summary(body)
            case DecisionMade() as body:
                self._on_decision(body, now_ns)
            case RequestFinished() as body:
                if body.outcome == "completed" and body.prompt_tokens > 0 and self._led.leads(body.model, now_ns):
                    ended = self._ended.setdefault(body.model, deque(maxlen=ENDED_MAX))
                    ended.append((body.prompt_tokens, body.cached_tokens))
            case KeyChanged() as body:
                self._led.on_key(body, now_ns)
        return []

    def _on_decision(self, body: DecisionMade, now_ns: int) -> None:
        if self._led.leads(body.model, now_ns) and body.kind == "dispatch" and body.chosen and body.prompt_tokens > 0:
            arrivals = self._arrivals.setdefault(body.model, deque(maxlen=REQUESTS_MAX))
            arrivals.append(PlacedPrompt(now_ns, body.chosen, body.prompt_tokens))

    def _on_tick(self, now_ns: int) -> list[Effect]:
        for known in (self._arrivals, self._ended, self._ordered):
            for model in [model for model in known if self._led.lost(model)]:
                del known[model]  # orders expire by themselves
        return [effect for model in self._led.led(now_ns) for effect in self._order(model, now_ns)]

    def _order(self, model: str, now_ns: int) -> list[Effect]:
        """Repeats the bounds that are wanted, and ends those that are wanted no longer."""
        before, serving = self._ordered.get(model, {}), {r.instance: r for r in self._led.serving(model)}
        ordered = self._ordered[model] = self._bounds(model, now_ns)
        effects = [self._budget(serving[name], tokens) for name, tokens in sorted(ordered.items())]
        effects += [self._budget(serving[name], 0) for name in sorted(set(before) - set(ordered)) if name in serving]
        for name in sorted(set(ordered) ^ set(before)):
            fields = {"instance": name, "tokens": ordered.get(name, 0)}
            effects.append(Log(level="info", event="step_bound", fields=fields))
        return effects

    def _bounds(self, model: str, now_ns: int) -> dict[str, int]:
        plan = self._led.plan(model)
        arrivals = [each for each in self._arrivals.get(model, ()) if now_ns - each.at_ns < ARRIVALS_NS]
        found: dict[str, int] = {}
        for record in self._led.serving(model):
            summary, costs = self._led.summary(record), self._instance_model(record)
            if summary is None or summary.indicators is None or costs is None or now_ns - summary.at_ns > SUMMARY_NS:
                continue
            load = _load(summary, self._prompt(model, arrivals), arrives=bool(arrivals) and _prefills(plan, record))
            tokens = step_bound(load, costs, record.token_budget, self._objectives)
            if tokens is not None:
                found[record.instance] = tokens
        return found

    def _prompt(self, model: str, arrivals: list[PlacedPrompt]) -> float:
        """Mean prompt tokens to compute of a new request: those of the last ones, without what caches held."""
        ended = self._ended.get(model, ())
        prompts, cached = sum(each[0] for each in ended), sum(each[1] for each in ended)
        fresh = 1 - min(1.0, cached / prompts) if prompts else 1.0
        mean = sum(each.prompt_tokens for each in arrivals) / len(arrivals) if arrivals else 0.0
        return mean * fresh

    def _budget(self, record: InstanceRecord, tokens: int) -> Effect:
        body = SetStepBudget(incarnation=record.incarnation, tokens=tokens, valid_ms=VALID_MS)
        return Publish(subject=self._subjects.engine(record.instance, "budget"), body=body)

    def snapshot(self) -> dict[str, Any]:
        told = {model: dict(sorted(ordered.items())) for model, ordered in sorted(self._ordered.items()) if ordered}
        return {"step_bounds": told}

    def check_invariants(self) -> None:
        assert all(len(arrivals) <= REQUESTS_MAX for arrivals in self._arrivals.values())


def _prefills(plan: Plan | None, record: InstanceRecord) -> bool:
    stages = plan.stages if plan is not None else []
    return not any(stage.roles.get(record.instance) is InstanceRole.DECODE for stage in stages)


def _load(summary: InstanceSummary, prompt: float, *, arrives: bool) -> StepLoad:
    told = summary.indicators
    assert told is not None
    decoding = told.decode.running + told.decode.waiting + told.decode.preempted if told.decode.running else 0
    return StepLoad(
        backlog=float(max(0, told.prefill_tokens_left)),
        decoding=float(max(0, decoding)),
        context=float(max(0, summary.running_tokens)),
        prompt=prompt,
        arrives=arrives,
    )
