"""Plans of cascades: which thresholds are in force, and which tiers have instances.

An actor of its own, hosted in the coordinator's process. Owns the plans of the configured cascades, each under a lease,
and what it heard of their traffic. A plan names each tier's threshold and how many instances serve it. Membership
follows the models' plans at once. Thresholds are the configured ones; those of the planner, where there is a target; or
those that a person put (``millrace plan --apply``).

| message in | change | messages out |
|---|---|---|
| KeyChanged(cascade / cascade_lease) | what another coordinator or an operator wrote is taken over | |
| KeyChanged(instance / plan) | instances of the tiers | PutKey(cascade) where that changes it |
| TimerFired(tick) | | PutKey(cascade_lease), PutKey(cascade); PlanCascade where rate or tiers have changed |
| RequestFinished (of a cascade) | rate of its traffic | |
| CascadePlanned, CascadePlanningFailed | no planner is at work | PutKey(cascade) where other thresholds are better |
| StopRequested | | DeleteKey(cascade_lease) where held, Stop |

Invariants: as in ``leased_plans.py``; one planner of a cascade at a time.
Overload: SAMPLES_MAX finished requests of each cascade are kept.
"""

from __future__ import annotations

from typing import Any

import msgspec
from millrace.actor.effects import Effect, Log, StartTimer, Stop, Subscribe
from millrace.contracts.cascade import CascadePlan, CascadeTier
from millrace.contracts.local import (
    BucketReady,
    BusReconnected,
    KeyChanged,
    KeyNotPut,
    KeyPut,
    KeyUnreadable,
    StopRequested,
    TimerFired,
)
from millrace.contracts.message import Message
from millrace.contracts.observers import RequestFinished
from millrace.contracts.plan import Lease
from millrace.contracts.subjects import Subjects, subject_token

from services.coordinator.cascade_config import CoordinatedCascade, CoordinatedTier
from services.coordinator.cascade_effects import CascadePlanned, CascadePlanningFailed, PlanCascade
from services.coordinator.cascade_planning import (
    CascadeState,
    Serving,
    job_of,
    planned,
    rate_of,
    take_outcome,
    why_plan,
)
from services.coordinator.config import CoordinatorConfig
from services.coordinator.leased_plans import LeasedPlan, LeasedPlans
from services.coordinator.led_models import TICK_NS, LedModels

#: Author of plans that a person put.
OPERATOR = "operator"

#: A planner that takes longer is killed, seconds.
PLAN_LIMIT_S = 120.0


class CascadesActor:
    """The configured cascades."""

    def __init__(self, config: CoordinatorConfig, *, incarnation: int) -> None:
        self.name = config.name
        self._subjects = Subjects(config.bus.cluster)
        self.states = {subject_token(cascade.name): CascadeState(cascade) for cascade in config.cascades}
        self.leased = LeasedPlans(
            CascadePlan,
            plans="cascade",
            leases="cascade_lease",
            names_max=len(self.states),
            name=config.name,
            incarnation=incarnation,
        )
        for state in self.states.values():
            self.leased.ensure(state.config.name)
        self._led = LedModels(config.name, incarnation)

    def start(self, now_ns: int) -> list[Effect]:
        learns = any(state.config.plans for state in self.states.values())
        return [
            *self.leased.start(),
            *self._led.start(),
            *([Subscribe(subject=self._subjects.outcomes())] if learns else []),
            StartTimer(name="tick", at_ns=now_ns + TICK_NS),
        ]

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        match message.body:
            case KeyChanged(bucket="instance" | "plan" | "lease") as body:
                self._led.on_key(body, now_ns)
                return self._write(now_ns)
            case KeyChanged() as body:
                return self._on_key(body, now_ns)
            case RequestFinished() as body:
                state = self.states.get(subject_token(body.model))
                if state is not None and body.outcome == "completed":
                    take_outcome(state, body)
                return []
            case KeyUnreadable() as body:
                mine = body.bucket in self.leased.buckets and body.key in self.states
                return self.leased.on_unreadable(body) if mine else []
            case CascadePlanned() as body:
                return self._on_planned(body, now_ns)
            case CascadePlanningFailed() as body:
                return self._on_planning_failed(body)
            case TimerFired() as body:
                return [StartTimer.again(body, now_ns, TICK_NS), *self._lead(now_ns)]
            case KeyPut() as body:
                self.leased.on_put(body)
                return []
            case KeyNotPut() as body:
                return self.leased.on_not_put(body)
            case BucketReady() as body:
                self.leased.on_ready(body)
                return self._lead(now_ns)
            case BusReconnected():
                self.leased.on_reconnected()
                return []
            case StopRequested():
                return [*self.leased.stop(now_ns), Stop(reason="asked to stop")]
            case _:
                return []

    # what the store says

    def _on_key(self, body: KeyChanged, now_ns: int) -> list[Effect]:
        """A plan or a lease changed. Those of cascades that are not configured are somebody else's."""
        state = self.states.get(body.key)
        if state is None:
            return []
        name = state.config.name if isinstance(body.value, CascadePlan | Lease) else ""
        effects = self.leased.on_key(body, name)
        state.plan = self._leased(state).plan
        return effects + self._write(now_ns)

    def _leased(self, state: CascadeState) -> LeasedPlan[CascadePlan]:
        known = self.leased.find(state.config.name)
        assert known is not None, "every configured cascade is known"
        return known

    # plans

    def _lead(self, now_ns: int) -> list[Effect]:
        return [*self.leased.lead(now_ns), *self._write(now_ns), *self._start_planners(now_ns)]

    def serving(self) -> Serving:
        """Instances by model of a tier, as the models' plans name them."""
        tiers = (tier for state in self.states.values() for tier in state.config.tiers)
        return {tier.model: self._led.serving(tier.model) for tier in tiers}

    def _write(self, now_ns: int) -> list[Effect]:
        """Writes plans that are led here and change."""
        effects: list[Effect] = []
        for state in self.states.values():
            known = self._leased(state)
            if not self.leased.may_plan(known, now_ns):
                continue
            plan = next_plan(state.config, known.plan, self.serving(), coordinator=self.name)
            if plan is None and known.plan is not None and known.lost:
                told = {"epoch": known.plan.epoch + 1, "reason": "the store lost the plan"}
                plan = msgspec.structs.replace(known.plan, **told)
            if plan is not None:
                effects += self._put(known, plan)
        return effects

    def _put(self, known: LeasedPlan[CascadePlan], plan: CascadePlan) -> list[Effect]:
        fields = {"cascade": plan.cascade, "epoch": plan.epoch, "reason": plan.reason, "meets": plan.meets}
        return [self.leased.put(known, plan), Log(level="info", event="cascade_planned", fields=fields)]

    # thresholds

    def _start_planners(self, now_ns: int) -> list[Effect]:
        """Starts a planner for each cascade that is led here and whose rate or tiers have changed; one at a time."""
        effects: list[Effect] = []
        serving = self.serving()
        for key, state in self.states.items():
            state.records |= {model: records[0] for model, records in serving.items() if records}
            why = why_plan(state, now_ns) if self.leased.leads(self._leased(state), now_ns) else ""
            job = job_of(state, serving, now_ns) if why else None
            if job is None:
                continue
            state.why, state.planned_ns, state.rate = why, now_ns, rate_of(state, now_ns)
            state.planned_empty = [tier.model for tier in state.config.tiers if not serving.get(tier.model)]
            effects.append(PlanCascade(key=key, job=job, limit_s=PLAN_LIMIT_S))
        return effects

    def _on_planned(self, body: CascadePlanned, now_ns: int) -> list[Effect]:
        """Puts better thresholds in force. What a planner said to one that no longer leads is dropped."""
        state = self.states[body.key]
        why, state.why, state.failures = state.why, "", 0
        known = self._leased(state)
        if known.plan is None or not self.leased.may_plan(known, now_ns):
            return []
        plan = planned(known.plan, body.result, coordinator=self.name, why=why)
        if plan is not None:
            return self._put(known, plan)
        fields = {"cascade": state.config.name, "why": why, "reason": body.result.keep or body.result.reason}
        return [Log(level="info", event="cascade_plan_kept", fields=fields)]

    def _on_planning_failed(self, body: CascadePlanningFailed) -> list[Effect]:
        """The plan in force holds; the next try waits twice as long."""
        state = self.states[body.key]
        state.why = ""
        state.failures += 1
        fields = {"cascade": state.config.name, "detail": body.detail, "failures": state.failures}
        return [Log(level="warning", event="cascade_planning_failed", fields=fields)]

    def snapshot(self) -> dict[str, Any]:
        told = {}
        for state in self.states.values():
            known = self._leased(state)
            told[state.config.name] = {
                "holder": known.lease.holder if known.lease else "",
                "epoch": known.plan.epoch if known.plan else 0,
                "thresholds": _thresholds(known.plan),
                "finished": len(state.finished),
                "planning": state.why,
            }
        return {"cascades": told}

    def check_invariants(self) -> None:
        assert len(self.leased) == len(self.states)


def next_plan(
    config: CoordinatedCascade, plan: CascadePlan | None, serving: Serving, *, coordinator: str
) -> CascadePlan | None:
    """The plan that should be in force; None where that is so already.

    Args:
        serving: Instances by model. Before any serves there is nothing to plan.
    """
    if plan is None or not _still_valid(config, plan):
        if not any(serving.get(tier.model) for tier in config.tiers):
            return None
        return CascadePlan(
            cascade=config.name,
            epoch=plan.epoch + 1 if plan is not None else 1,
            tiers=[_first(tier, serving) for tier in config.tiers],
            judge=config.judge,
            coordinator=coordinator,
            reason="thresholds as configured; nothing was judged yet",
        )
    tiers = [_present(tier, serving) for tier in plan.tiers]
    if tiers == plan.tiers and plan.judge == config.judge:
        return None
    change = membership_change(plan, tiers)
    return msgspec.structs.replace(plan, epoch=plan.epoch + 1, tiers=tiers, judge=config.judge, reason=change)


def _first(tier: CoordinatedTier, serving: Serving) -> CascadeTier:
    """A tier of the first plan."""
    count = len(serving.get(tier.model, ()))
    awaited = not count and tier.instances > 0
    return CascadeTier(model=tier.model, threshold=tier.threshold, instances=count, awaited=awaited)


def _present(tier: CascadeTier, serving: Serving) -> CascadeTier:
    """A tier of a plan with the instances that serve; one that had some is to have some again."""
    count = len(serving.get(tier.model, ()))
    return msgspec.structs.replace(tier, instances=count, awaited=not count and (tier.awaited or tier.instances > 0))


def _still_valid(config: CoordinatedCascade, plan: CascadePlan) -> bool:
    """Whether its tiers are the configured ones, and its thresholds, where neither a planner nor a person sets them."""
    if [tier.model for tier in plan.tiers] != [tier.model for tier in config.tiers]:
        return False
    same = _thresholds(plan) == [tier.threshold for tier in config.tiers]
    return same or config.plans or plan.coordinator == OPERATOR


def _thresholds(plan: CascadePlan | None) -> list[float]:
    return [tier.threshold for tier in plan.tiers] if plan is not None else []


def membership_change(plan: CascadePlan, tiers: list[CascadeTier]) -> str:
    """Human-readable description of a change of membership: ``nano: 2 instances, had 1``."""
    pairs = zip(tiers, plan.tiers, strict=True)
    told = [
        f"{tier.model}: {tier.instances} instance{'s' if tier.instances != 1 else ''}, had {old.instances}"
        for tier, old in pairs
        if tier.instances != old.instances
    ]
    return "; ".join(told) or "the judge was configured anew"
