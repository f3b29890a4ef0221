"""Plans of cascades: who leads each, which thresholds are in force, which tiers have instances. No I/O.

A plan names each tier's threshold and how many instances serve it. Membership follows at once. Thresholds are the
configured ones; those of the planner, where there is a target; or those that a person put (``millrace plan --apply``).
A plan's move is carried out in ``cascade_moves.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from millrace.actor.effects import DeleteKey, Effect, Log, PutKey, WatchKeys
from millrace.contracts.cascade import CascadePlan, CascadeTier, ReplicaCount
from millrace.contracts.local import BucketReady, KeyChanged, KeyNotPut, KeyPut, KeyUnreadable, Replied, RequestFailed
from millrace.contracts.observers import RequestFinished, ShadowFinished
from millrace.contracts.plan import Lease
from millrace.contracts.status import InstanceRecord
from millrace.contracts.subjects import Subjects, subject_token

from services.coordinator.cascade_config import CoordinatedCascade, CoordinatedTier
from services.coordinator.cascade_effects import CascadePlanned, CascadePlanningFailed, PlanCascade
from services.coordinator.cascade_moves import CascadeMoves
from services.coordinator.cascade_planning import job_of, planned, take_outcome, take_shadow, why_plan
from services.coordinator.cascade_state import CascadeState, Serving
from services.coordinator.leases import replace_unreadable
from services.coordinator.state import KeyState

#: Author of plans that a person put.
OPERATOR = "operator"

BUCKET = "cascade"
LEASE_BUCKET = "cascade_lease"

#: How long a lease holds, and what is left of it when it is renewed: as a model's.
LEASE_NS = 15_000_000_000
LEASE_RENEW_NS = 11_000_000_000


class Cascades:
    """The configured cascades."""

    def __init__(
        self, configs: Sequence[CoordinatedCascade], *, subjects: Subjects, name: str, incarnation: int
    ) -> None:
        self._moves = CascadeMoves(subjects, name=name, incarnation=incarnation)
        self._name = name
        self._incarnation = incarnation
        self._ready: set[str] = set()
        self.states = {subject_token(config.name): CascadeState(config) for config in configs}

    @property
    def learns(self) -> bool:
        """Whether outcomes are listened to."""
        return any(state.config.plans for state in self.states.values())

    def start(self) -> list[Effect]:
        """Watches plans and leases."""
        return [WatchKeys(bucket=BUCKET), WatchKeys(bucket=LEASE_BUCKET)]

    def tick(self, serving: Serving, now_ns: int) -> list[Effect]:
        """Takes and renews leases; writes plans that changed."""
        if not {BUCKET, LEASE_BUCKET} <= self._ready:
            return []
        effects: list[Effect] = []
        for key, state in self.states.items():
            if not state.lease_key.writing and self._may_write_lease(state, now_ns):
                effects.append(self._put_lease(key, state, now_ns))
            effects += self.write(key, serving, now_ns)
            effects += self._move(key, serving, now_ns)
            effects += self._start_planner(key, serving, now_ns)
        return effects

    def _move(self, key: str, serving: Serving, now_ns: int) -> list[Effect]:
        """Goes on with the plan's move where the cascade is led."""
        state = self.states[key]
        if state.plan is None or state.plan.move is None or not self.leads(state, now_ns):
            state.orders, state.refusals = [], 0
            return []
        if state.plan_key.writing:
            return []
        plan, effects = self._moves.step(state, serving, now_ns)
        return effects if plan is None else [*effects, *self.put(key, plan)]

    def on_answer(self, body: Replied | RequestFailed, now_ns: int) -> list[Effect]:
        """Handles what became of an order of a move."""
        take = self._moves.on_answer if isinstance(body, Replied) else self._moves.on_failure
        return [effect for state in self.states.values() for effect in take(state, body, now_ns)]  # type: ignore[arg-type]

    def _start_planner(self, key: str, serving: Serving, now_ns: int) -> list[Effect]:
        """Start a planner where the cascade is led and traffic has changed; one at a time."""
        state = self.states[key]
        state.records |= {model: records[0] for model, records in serving.items() if records}
        why = why_plan(state, now_ns) if self.leads(state, now_ns) else ""
        job = job_of(state, serving, now_ns) if why else None
        if job is None:
            return []
        state.why, state.planned_ns = why, now_ns
        state.planned_empty = [tier.model for tier in state.config.members if not serving.get(tier.model)]
        return [PlanCascade(key=key, job=job, limit_s=state.config.plan_limit_s)]

    def on_outcome(self, body: RequestFinished) -> None:
        """Notes a finished request of a cascade; attempts are their models' own."""
        state = self.states.get(subject_token(body.model))
        if state is not None and body.outcome == "completed":
            take_outcome(state, body)

    def on_shadow(self, body: ShadowFinished) -> None:
        """Notes what every tier answered to a sampled request."""
        state = self.states.get(subject_token(body.cascade))
        if state is not None:
            take_shadow(state, body)

    def on_planned(self, body: CascadePlanned, now_ns: int) -> list[Effect]:
        """Puts better thresholds in force. What a planner said to one that no longer leads is dropped."""
        state = self.states[body.key]
        why, state.why, state.failures = state.why, "", 0
        state.baseline, state.since_ns = None, now_ns
        if state.plan is None or state.plan_key.writing or not self.leads(state, now_ns):
            return []
        plan = planned(state.config, state.plan, body.result, coordinator=self._name, why=why, now_ns=now_ns)
        if plan is not None:
            return self.put(body.key, plan)
        fields = {"cascade": state.config.name, "why": why, "reason": body.result.keep or body.result.reason}
        return [Log(level="info", event="cascade_plan_kept", fields=fields)]

    def on_planning_failed(self, body: CascadePlanningFailed) -> list[Effect]:
        """The plan in force holds; the next try waits twice as long."""
        state = self.states[body.key]
        state.why = ""
        state.failures += 1
        fields = {"cascade": state.config.name, "detail": body.detail, "failures": state.failures}
        return [Log(level="warning", event="cascade_planning_failed", fields=fields)]

    def write(self, key: str, serving: Serving, now_ns: int) -> list[Effect]:
        """Writes the plan of one cascade where it is led and changes."""
        state = self.states[key]
        if state.plan_key.writing or not self.leads(state, now_ns) or BUCKET not in self._ready:
            return []
        plan = next_plan(state.config, state.plan, serving, coordinator=self._name)
        return [] if plan is None else self.put(key, plan)

    def put(self, key: str, plan: CascadePlan) -> list[Effect]:
        """Writes a plan over the revision that was seen, and says so."""
        state = self.states[key]
        state.plan_key.writing = True
        fields = {"cascade": plan.cascade, "epoch": plan.epoch, "reason": plan.reason, "meets": plan.meets}
        write = PutKey(
            bucket=BUCKET,
            key=key,
            value=plan,
            correlation=f"{BUCKET}/{key}",
            expected_revision=state.plan_key.revision,
        )
        return [write, Log(level="info", event="cascade_planned", fields=fields)]

    def leads(self, state: CascadeState, now_ns: int) -> bool:
        """Whether this coordinator holds the cascade's lease."""
        lease = state.lease
        if lease is None or lease.until_ns <= now_ns:
            return False
        return lease.holder == self._name and lease.incarnation == self._incarnation

    # what the store says

    def on_key(self, body: KeyChanged, now_ns: int) -> list[Effect]:
        """A plan or a lease changed. Plans of cascades that are not configured are somebody else's."""
        state = self.states.get(body.key)
        if state is None:
            return []
        wanted: type[CascadePlan] | type[Lease] = CascadePlan if body.bucket == BUCKET else Lease
        if body.value is not None and not isinstance(body.value, wanted):
            return [Log(level="warning", event="key_of_wrong_type", fields={"bucket": body.bucket, "key": body.key})]
        if body.bucket == BUCKET:
            plan = body.value if isinstance(body.value, CascadePlan) else None
            if _thresholds(plan) != _thresholds(state.plan):
                state.baseline, state.since_ns = None, now_ns
            state.plan = plan
            state.plan_key.confirm(body)
        else:
            state.lease = body.value if isinstance(body.value, Lease) else None
            state.lease_key.confirm(body)
        return []

    def on_unreadable(self, body: KeyUnreadable) -> list[Effect]:
        """Writes the plan that held over it, with what a person put; what is not known is deleted."""
        state = self.states.get(body.key)
        if body.bucket != BUCKET or state is None or state.plan is None:
            return replace_unreadable(body)
        state.plan_key.revision = body.revision
        told = {"epoch": state.plan.epoch + 1, "reason": "the stored plan could not be read"}
        return self.put(body.key, msgspec.structs.replace(state.plan, **told))

    def on_put(self, body: KeyPut) -> None:
        """A write is done; the watch tells its value."""
        held = self._held(body.correlation)
        if held is not None:
            held.revision = max(held.revision, body.revision)
            held.writing = False

    def on_not_put(self, body: KeyNotPut) -> list[Effect]:
        """Somebody else was faster; the watch tells the winner, the next tick tries again."""
        held = self._held(body.correlation)
        if held is not None:
            held.writing = False
        fields = {"key": body.correlation, "reason": str(body.reason)}
        return [Log(level="info", event="key_not_written", fields=fields)]

    def on_ready(self, body: BucketReady) -> None:
        """All keys of a bucket have been told."""
        self._ready.add(body.bucket)
        for state in self.states.values():
            held = state.plan_key if body.bucket == BUCKET else state.lease_key
            if body.bucket in (BUCKET, LEASE_BUCKET) and held.stale:  # the store came back without this key
                held.revision, held.stale = 0, False
                if body.bucket == LEASE_BUCKET:
                    state.lease = None

    def on_reconnected(self) -> None:
        """Revisions are unconfirmed until the watches say BucketReady."""
        self._ready.clear()
        for state in self.states.values():
            for held in (state.plan_key, state.lease_key):
                held.stale, held.writing = True, False

    def stop(self, now_ns: int) -> list[Effect]:
        """Gives the leases back."""
        return [
            DeleteKey(bucket=LEASE_BUCKET, key=key, correlation=f"release/{key}")
            for key, state in self.states.items()
            if self.leads(state, now_ns)
        ]

    def _held(self, correlation: str) -> KeyState | None:
        bucket, _, key = correlation.partition("/")
        state = self.states.get(key)
        if state is None:
            return None
        return {BUCKET: state.plan_key, LEASE_BUCKET: state.lease_key}.get(bucket)

    def _may_write_lease(self, state: CascadeState, now_ns: int) -> bool:
        lease = state.lease
        if lease is None or lease.until_ns <= now_ns:
            return True
        return lease.holder == self._name and (
            lease.until_ns - now_ns < LEASE_RENEW_NS or lease.incarnation != self._incarnation
        )

    def _put_lease(self, key: str, state: CascadeState, now_ns: int) -> Effect:
        state.lease_key.writing = True
        until_ns = now_ns + LEASE_NS
        value = Lease(model=state.config.name, holder=self._name, incarnation=self._incarnation, until_ns=until_ns)
        return PutKey(
            bucket=LEASE_BUCKET,
            key=key,
            value=value,
            correlation=f"{LEASE_BUCKET}/{key}",
            expected_revision=state.lease_key.revision,
        )

    def snapshot(self) -> dict[str, Any]:
        """State by cascade: the holder of its lease, and its plan."""
        return {
            state.config.name: {
                "holder": state.lease.holder if state.lease else "",
                "epoch": state.plan.epoch if state.plan else 0,
                "thresholds": [tier.threshold for tier in state.plan.tiers] if state.plan else [],
                "finished": len(state.finished),
                "planning": state.why,
                "moving": state.plan.move.instances if state.plan and state.plan.move else [],
            }
            for state in self.states.values()
        }


def next_plan(
    config: CoordinatedCascade, plan: CascadePlan | None, serving: Serving, *, coordinator: str
) -> CascadePlan | None:
    """The plan that should be in force; None where that is so already.

    Args:
        plan: In force; None for none.
        serving: Instances by model. Before any serves there is nothing to plan.
    """
    if plan is None or not _still_valid(config, plan):
        if not any(serving.get(tier.model) for tier in config.tiers):
            return None
        epoch = plan.epoch + 1 if plan is not None else 1
        return CascadePlan(
            cascade=config.name,
            epoch=epoch,
            tiers=[_first(tier, serving) for tier in config.tiers],
            judge=config.judge,
            judge_tier=_first(config.judge_tier, serving) if config.judge_tier is not None else None,
            coordinator=coordinator,
            reason="thresholds as configured; nothing was judged yet",
        )
    now = [
        _present(tier, held, serving, wanted=wanted)
        for tier, held, wanted in zip(plan.members, config.members, _wanted(plan), strict=True)
    ]
    tiers, judging = now[: len(plan.tiers)], _judging(config, plan, now)
    if tiers == plan.tiers and judging == plan.judge_tier and plan.judge == config.judge:
        return None
    return msgspec.structs.replace(
        plan,
        epoch=plan.epoch + 1,
        tiers=tiers,
        judge=config.judge,
        judge_tier=judging,
        reason=membership_change(plan, now),
    )


def _first(tier: CoordinatedTier, serving: Serving) -> CascadeTier:
    """A tier of the first plan."""
    held = replicas_of(tier, serving.get(tier.model, ()))
    return CascadeTier(
        model=tier.model, threshold=tier.threshold, replicas=held, awaited=not held and tier.instances > 0
    )


def _present(tier: CascadeTier, held: CoordinatedTier, serving: Serving, *, wanted: bool) -> CascadeTier:
    """A tier of a plan with the instances that serve."""
    replicas = replicas_of(held, serving.get(tier.model, ()))
    return msgspec.structs.replace(tier, replicas=replicas, awaited=not replicas and wanted)


def _judging(config: CoordinatedCascade, plan: CascadePlan, now: Sequence[CascadeTier]) -> CascadeTier | None:
    """The judge's model with the instances that serve: an entry of its own, or those of the tier that it is."""
    if config.judge_tier is None or plan.judge_tier is None:
        return None
    own = next(tier for tier in now if tier.model == config.judge_tier.model)
    return msgspec.structs.replace(plan.judge_tier, replicas=own.replicas, awaited=own.awaited)


def _wanted(plan: CascadePlan) -> list[bool]:
    """Whether each tier is to have instances: those of the move under way, else those that had some."""
    if plan.move is not None:
        return [count > 0 for count in plan.move.instances]
    return [tier.awaited or bool(tier.replicas) for tier in plan.members]


def _still_valid(config: CoordinatedCascade, plan: CascadePlan) -> bool:
    """Whether its tiers are the configured ones, and its thresholds, where neither a planner nor a person sets them."""
    if [tier.model for tier in plan.members] != [tier.model for tier in config.members]:
        return False
    if _name(plan.judge_tier) != _name(config.judge_tier):
        return False
    same = [tier.threshold for tier in plan.tiers] == [tier.threshold for tier in config.tiers]
    return same or config.plans or plan.coordinator == OPERATOR


def _name(tier: CascadeTier | CoordinatedTier | None) -> str:
    return tier.model if tier is not None else ""


def replicas_of(tier: CoordinatedTier, instances: Sequence[InstanceRecord]) -> list[ReplicaCount]:
    """Instances of a tier by shape; empty where none serves."""
    if not instances:
        return []
    count = len(instances)
    return [ReplicaCount(tensor_parallel=tier.tensor_parallel, pipeline_parallel=1, count=count, device=tier.device)]


def _thresholds(plan: CascadePlan | None) -> list[float]:
    return [tier.threshold for tier in plan.tiers] if plan is not None else []


def membership_change(plan: CascadePlan, tiers: Sequence[CascadeTier]) -> str:
    """Human-readable description of a change of membership: ``nano: 2 instances, had 1``."""
    counts = [(tier.model, _count(tier), _count(old)) for tier, old in zip(tiers, plan.members, strict=True)]
    told = [f"{model}: {now} instance{'s' if now != 1 else ''}, had {old}" for model, now, old in counts if now != old]
    return "; ".join(told) or "the judge was configured anew"


def _count(tier: CascadeTier) -> int:
    return sum(each.count for each in tier.replicas)
