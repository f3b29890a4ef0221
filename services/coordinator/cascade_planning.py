"""Decision to plan a cascade anew, the planner's job, and use of its result. Pure.

The first plan is made as soon as some requests have finished. From then on traffic is compared, once a period, with the
first traffic under the thresholds in force. A planner starts only where rate, lengths or scores have changed. It
changes thresholds only where others are better by the same simulation.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from millrace.cascade.drift import DriftSettings, TrafficWindow, detect_drift
from millrace.cascade.jobs import PlannedTier, PlanningJob, PlanningResult
from millrace.contracts.cascade import CascadePlan
from millrace.contracts.observers import RequestFinished
from millrace.contracts.status import InstanceRecord
from millrace.enginemodel.registered import scheduler_parameters

from services.coordinator.cascade_config import CoordinatedCascade, CoordinatedTier

#: Finished requests before the first plan: a rate from fewer is off by a quarter.
REQUESTS_MIN = 50

#: Of the baseline: requests, and its span. A rate from a minute is off by too much to be compared with.
BASELINE_MIN = 200
BASELINE_NS = 300_000_000_000

#: Share of requests whose answer only the escalation budget accepted from which thresholds are planned anew.
BUDGET_SHARE = 0.05

#: Reason of such an answer, as RequestFinished has it.
BY_BUDGET = "escalation_budget"

#: Width of the bins in which arrivals are counted to compare rates.
BIN_NS = 5_000_000_000

NS = 1_000_000_000


#: Finished requests kept of one cascade. At 27 a second the usual window of 10 minutes is whole; some 2 MB.
SAMPLES_MAX = 16_384


class CascadeTraffic(msgspec.Struct, frozen=True):
    """A finished request of a cascade.

    Attributes:
        output_tokens: Of the first attempt.
        score: Of the first attempt's answer; None where it has none.
        by_budget: Whether it got an answer that only the escalation budget accepted.
    """

    arrival_ns: int
    ended_ns: int
    prompt_tokens: int
    output_tokens: int
    score: float | None
    by_budget: bool = False


class TrafficSpan(msgspec.Struct, frozen=True):
    """All requests that arrived from ``start_ns`` on and before ``until_ns``."""

    requests: list[CascadeTraffic]
    start_ns: int
    until_ns: int


#: Serving instances of each model.
Serving = Mapping[str, Sequence[InstanceRecord]]


@dataclass
class CascadeState:
    """Traffic and plannings of one cascade.

    Attributes:
        plan: In force.
        records: The newest record of an instance by model: what a tier is when nobody serves it any more.
        finished: Requests, oldest first.
        baseline: The first ones under the thresholds in force: what later traffic is compared with; None until there
            are enough. Early rejection cuts answers by threshold, so traffic under other thresholds looks different
            without being so.
        since_ns: When the thresholds in force were seen first.
        why: Why the planner at work was started; empty where none is.
        looked_ns: When it was last looked at whether the plan fits.
        planned_ns: When the last planner was started; 0 for never.
        planned_empty: Models without an instance at the last planning; None before the first.
        budget_epoch: Plan for which a planner was started because the escalation budget lowered its thresholds.
        failures: Planners in a row that failed.
    """

    config: CoordinatedCascade
    plan: CascadePlan | None = None
    finished: deque[CascadeTraffic] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))
    records: dict[str, InstanceRecord] = field(default_factory=dict)
    baseline: TrafficSpan | None = None
    since_ns: int = 0
    why: str = ""
    looked_ns: int = 0
    planned_ns: int = 0
    planned_empty: list[str] | None = None
    budget_epoch: int = -1
    failures: int = 0


def take_outcome(state: CascadeState, body: RequestFinished) -> None:
    """Notes a finished request of a cascade."""
    first = body.attempts[0] if body.attempts else None
    state.finished.append(
        CascadeTraffic(
            arrival_ns=body.arrival_ns,
            ended_ns=body.arrival_ns + body.e2e_ns,
            prompt_tokens=max(1, body.prompt_tokens),
            output_tokens=max(1, first.output_tokens if first is not None else sum(body.output_tokens)),
            score=first.score if first is not None else None,
            by_budget=body.reason == BY_BUDGET,
        )
    )


def why_plan(state: CascadeState, now_ns: int) -> str:
    """Reason to start a planner now; empty for none. Looks once a period."""
    config = state.config
    rest_ns = config.pause_s * NS * 2 ** min(state.failures, 5)
    rested = not state.planned_ns or now_ns - state.planned_ns >= rest_ns
    if not config.plans or state.plan is None or state.why or not rested:
        return ""
    if state.plan.quality is None:
        return "the first requests have finished" if len(_recent(state, now_ns)) >= REQUESTS_MIN else ""
    if now_ns - state.looked_ns < config.period_s * NS:
        return ""
    state.looked_ns = now_ns
    return _changed_tiers(state) or _over_budget(state, now_ns) or _drift(state, now_ns)


def _over_budget(state: CascadeState, now_ns: int) -> str:
    """Reason to plan where the escalation budget lowers thresholds too often; empty where not. Once per plan."""
    assert state.plan is not None
    under = [one for one in _recent(state, now_ns) if one.arrival_ns >= state.since_ns]
    share = sum(one.by_budget for one in under) / max(1, len(under))
    if len(under) < REQUESTS_MIN or share < BUDGET_SHARE or state.budget_epoch == state.plan.epoch:
        return ""
    state.budget_epoch = state.plan.epoch
    return f"the escalation budget lowered thresholds for {share:.0%} of requests"


def _changed_tiers(state: CascadeState) -> str:
    """Tiers that have come or gone since the last planning; empty for none."""
    assert state.plan is not None
    empty = [tier.model for tier in state.plan.tiers if not tier.instances]
    if state.planned_empty is None or sorted(empty) == sorted(state.planned_empty):
        return ""
    return (
        f"tiers without an instance: {', '.join(empty) or 'none'}, planned {', '.join(state.planned_empty) or 'none'}"
    )


def _drift(state: CascadeState, now_ns: int) -> str:
    """Changes of traffic since the baseline; empty where nothing changed, or while there is no baseline."""
    current = _known(state, state.baseline.until_ns if state.baseline else state.since_ns, now_ns)
    if state.baseline is None:
        long = current.until_ns - current.start_ns >= BASELINE_NS or len(state.finished) == SAMPLES_MAX
        state.baseline = current if long and len(current.requests) >= BASELINE_MIN else None
        return ""
    settings = DriftSettings(interval_s=state.config.period_s)
    found = detect_drift(_window(state.baseline), _window(current), settings)
    return "; ".join(each.text() for each in found)


def job_of(state: CascadeState, serving: Serving, now_ns: int) -> PlanningJob | None:
    """Job for a planner; None where a tier's engine was never seen, or no request has finished."""
    config, plan = state.config, state.plan
    tiers = [planned_tier(tier, serving.get(tier.model, ()), state.records.get(tier.model)) for tier in config.tiers]
    known = [tier for tier in tiers if tier is not None]
    traffic = _known(state, 0, now_ns)
    if len(known) < len(tiers) or not traffic.requests or plan is None:
        return None
    first_ns = max(traffic.start_ns, min(one.arrival_ns for one in state.finished))
    span_s = max(1.0, (traffic.until_ns - first_ns) / NS)
    return PlanningJob(
        tiers=known,
        sample=config.sample,
        rate=len(traffic.requests) / span_s,
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
        tensor_parallel=tier.tensor_parallel,
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
    )


def _recent(state: CascadeState, now_ns: int) -> list[CascadeTraffic]:
    since_ns = now_ns - round(state.config.window_s * NS)
    return [one for one in state.finished if one.arrival_ns >= since_ns]


def _known(state: CascadeState, since_ns: int, now_ns: int) -> TrafficSpan:
    """The last span of time of which every request is known, not longer than the window.

    It begins where older requests were dropped. It ends before now by the longest time that a request took: of those
    that came later only the short ones have ended. At most half of the span is left out so.
    """
    full = len(state.finished) == SAMPLES_MAX
    start_ns = max(since_ns, now_ns - round(state.config.window_s * NS), state.finished[0].ended_ns if full else 0)
    begun = [one for one in state.finished if one.arrival_ns >= start_ns]
    longest_ns = max((one.ended_ns - one.arrival_ns for one in begun), default=0)
    until_ns = max(start_ns, now_ns - min(longest_ns, (now_ns - start_ns) // 2))
    return TrafficSpan([one for one in begun if one.arrival_ns < until_ns], start_ns, until_ns)


def _window(span: TrafficSpan) -> TrafficWindow:
    """Requests of a span; a last bin that is not full is left out."""
    bins = max(0, (span.until_ns - span.start_ns) // BIN_NS)
    edges = span.start_ns + BIN_NS * np.arange(bins + 1)
    arrivals = np.array([one.arrival_ns for one in span.requests], dtype=np.int64)
    scores = [one.score for one in span.requests if one.score is not None]
    return TrafficWindow(
        counts=np.histogram(arrivals, bins=edges)[0].tolist() if bins else [],
        prompt_tokens=np.array([one.prompt_tokens for one in span.requests], dtype=np.int64),
        output_tokens=np.array([one.output_tokens for one in span.requests], dtype=np.int64),
        scores=[np.array(scores, dtype=np.float64)],
    )
