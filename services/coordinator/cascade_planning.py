"""Decision to plan a cascade anew, the planner's job, and use of its result. Pure.

The first plan is made as soon as some requests have finished. From then on the rate of requests is compared, once a
period, with the one that the last planner had; it is all of the traffic that a planner looks at beside the recorded
sample. A planner starts where the rate or the tiers have changed. It changes thresholds only where others are better by
the same simulation.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
from millrace.cascade.jobs import PlannedTier, PlanningJob, PlanningResult
from millrace.contracts.cascade import CascadePlan
from millrace.contracts.observers import RequestFinished
from millrace.contracts.status import InstanceRecord
from millrace.enginemodel.registered import scheduler_parameters

from services.coordinator.cascade_config import CoordinatedCascade, CoordinatedTier

#: Finished requests before the first plan: a rate from fewer is off by a quarter.
REQUESTS_MIN = 50

#: Least change of the rate that counts, as a share and in standard deviations of Poisson arrivals. Bursts deviate more
#: and start a planner in vain, which then keeps the thresholds.
RATE_CHANGE, RATE_DEVIATIONS = 0.15, 4.0

#: Finished requests kept of one cascade. At 27 a second the usual window of 10 minutes is whole; some 1 MB.
SAMPLES_MAX = 16_384

NS = 1_000_000_000


class FinishedCall(NamedTuple):
    """A finished request of a cascade."""

    arrival_ns: int
    ended_ns: int


class ArrivalRate(NamedTuple):
    """Requests/s, and the span that it was measured over, seconds."""

    per_s: float
    span_s: float

    def deviation(self, other: ArrivalRate) -> float:
        """Standard deviation of the difference of two rates that are the same."""
        return math.sqrt(self.per_s / self.span_s + self.per_s / other.span_s)


#: Serving instances of each model.
Serving = Mapping[str, Sequence[InstanceRecord]]


@dataclass
class CascadeState:
    """Traffic and plannings of one cascade.

    Attributes:
        plan: In force.
        records: The newest record of an instance by model: what a tier is when nobody serves it any more.
        finished: Requests, oldest first.
        rate: That the last planner had; None before the first.
        why: Why the planner at work was started; empty where none is.
        looked_ns: When it was last looked at whether the plan fits.
        planned_ns: When the last planner was started; 0 for never.
        planned_empty: Models without an instance at the last planning; None before the first.
        failures: Planners in a row that failed.
    """

    config: CoordinatedCascade
    plan: CascadePlan | None = None
    finished: deque[FinishedCall] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))
    records: dict[str, InstanceRecord] = field(default_factory=dict)
    rate: ArrivalRate | None = None
    why: str = ""
    looked_ns: int = 0
    planned_ns: int = 0
    planned_empty: list[str] | None = None
    failures: int = 0


def take_outcome(state: CascadeState, body: RequestFinished) -> None:
    """Notes a finished request of a cascade."""
    state.finished.append(FinishedCall(body.arrival_ns, body.arrival_ns + body.e2e_ns))


def why_plan(state: CascadeState, now_ns: int) -> str:
    """Reason to start a planner now; empty for none. Looks once a period."""
    config = state.config
    rest_ns = config.pause_s * NS * 2 ** min(state.failures, 5)
    rested = not state.planned_ns or now_ns - state.planned_ns >= rest_ns
    if not config.plans or state.plan is None or state.why or not rested:
        return ""
    if state.plan.quality is None:
        since_ns = now_ns - round(config.window_s * NS)
        recent = sum(one.arrival_ns >= since_ns for one in state.finished)
        return "the first requests have finished" if recent >= REQUESTS_MIN else ""
    if now_ns - state.looked_ns < config.period_s * NS:
        return ""
    state.looked_ns = now_ns
    return _changed_tiers(state) or _changed_rate(state, now_ns)


def _changed_tiers(state: CascadeState) -> str:
    """Tiers that have come or gone since the last planning; empty for none."""
    assert state.plan is not None
    empty = [tier.model for tier in state.plan.tiers if not tier.instances]
    if state.planned_empty is None or sorted(empty) == sorted(state.planned_empty):
        return ""
    return (
        f"tiers without an instance: {', '.join(empty) or 'none'}, planned {', '.join(state.planned_empty) or 'none'}"
    )


def _changed_rate(state: CascadeState, now_ns: int) -> str:
    """The change of the rate since the last planning; empty where it is the same."""
    now, before = rate_of(state, now_ns), state.rate
    if now is None or before is None:  # planned by a predecessor
        state.rate = now
        return ""
    change = abs(now.per_s - before.per_s)
    if change < max(RATE_CHANGE * before.per_s, RATE_DEVIATIONS * before.deviation(now)):
        return ""
    return f"rate {now.per_s:.2f}/s, planned {before.per_s:.2f}/s"


def rate_of(state: CascadeState, now_ns: int) -> ArrivalRate | None:
    """Rate over the last span of time of which every request is known, not longer than the window; None for none.

    It begins where older requests were dropped. It ends before now by the longest time that a request took: of those
    that came later only the short ones have ended. At most half of the span is left out so.
    """
    full = len(state.finished) == SAMPLES_MAX
    start_ns = max(now_ns - round(state.config.window_s * NS), state.finished[0].ended_ns if full else 0)
    begun = [one for one in state.finished if one.arrival_ns >= start_ns]
    longest_ns = max((one.ended_ns - one.arrival_ns for one in begun), default=0)
    until_ns = max(start_ns, now_ns - min(longest_ns, (now_ns - start_ns) // 2))
    known = [one.arrival_ns for one in begun if one.arrival_ns < until_ns]
    if not known:
        return None
    first_ns = max(start_ns, min(one.arrival_ns for one in state.finished))
    span_s = max(1.0, (until_ns - first_ns) / NS)
    return ArrivalRate(len(known) / span_s, span_s)


def job_of(state: CascadeState, serving: Serving, now_ns: int) -> PlanningJob | None:
    """Job for a planner; None where a tier's engine was never seen, or no request has finished."""
    config, plan = state.config, state.plan
    tiers = [planned_tier(tier, serving.get(tier.model, ()), state.records.get(tier.model)) for tier in config.tiers]
    known, rate = [tier for tier in tiers if tier is not None], rate_of(state, now_ns)
    if len(known) < len(tiers) or rate is None or plan is None:
        return None
    return PlanningJob(
        tiers=known,
        sample=config.sample,
        rate=rate.per_s,
        quality=config.quality,
        latency_s=config.latency_s,
        thresholds=[] if plan.quality is None else [tier.threshold for tier in plan.tiers[:-1]],
        planned_p95_s=plan.p95_ns / NS,
    )


def planned_tier(
    tier: CoordinatedTier, instances: Sequence[InstanceRecord], last: InstanceRecord | None
) -> PlannedTier | None:
    """A tier as planning needs it; None where no instance ever said what it is, or one says what cannot be.

    Args:
        last: The newest record of the model, for a tier without instances.
    """
    record = instances[0] if instances else last
    if record is None:
        return None
    try:
        parameters = scheduler_parameters(record)
    except ValueError:
        return None
    return PlannedTier(
        model=tier.model,
        step_time=record.step_time,
        parameters=parameters,
        instances=len(instances),
        judge=tier.judge,
    )


def planned(plan: CascadePlan, result: PlanningResult, *, coordinator: str, why: str) -> CascadePlan | None:
    """The next plan; None where the one in force stays."""
    chosen = result.chosen
    if chosen is None or result.keep or len(chosen.thresholds) + 1 != len(plan.tiers):
        return None
    thresholds = [*chosen.thresholds, 0.0]
    tiers = [
        msgspec.structs.replace(tier, threshold=threshold, share=share)
        for tier, threshold, share in zip(plan.tiers, thresholds, chosen.shares, strict=True)
    ]
    return msgspec.structs.replace(
        plan,
        epoch=plan.epoch + 1,
        tiers=tiers,
        quality=chosen.quality,
        quality_low=max(0.0, chosen.quality_low),
        p95_ns=round(chosen.p95_s * NS) if math.isfinite(chosen.p95_s) else 0,
        meets=result.meets,
        coordinator=coordinator,
        reason=f"{why}: {result.reason}",
        front=result.front,
    )
