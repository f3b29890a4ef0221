"""Decision to plan a cascade anew, and use of the result. Pure.

The first plan is made as soon as some requests have finished. From then on traffic is compared, once a period, with the
first traffic under the thresholds in force. A planner starts only where rate, lengths or scores have changed. It
changes thresholds only where others are better by the same simulation. Instances of other models, where they are worth
their drain and cold start, become the plan's move if the cluster has a pool of devices; else the plan's reason says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from millrace.cascade.drift import DriftSettings, TrafficWindow, detect_drift
from millrace.cascade.jobs import PlannedTier, PlanningJob, PlanningResult, asked_judge, planned_move
from millrace.cascade.sample import Floats
from millrace.contracts.cascade import CascadeMove, CascadePlan
from millrace.contracts.observers import RequestFinished, ShadowFinished
from millrace.contracts.status import InstanceRecord
from millrace.enginemodel.registered import scheduler_parameters

from services.coordinator.cascade_config import CoordinatedCascade, CoordinatedTier
from services.coordinator.cascade_state import SAMPLES_MAX, CascadeState, CascadeTraffic, Serving, TrafficSpan

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


def take_shadow(state: CascadeState, body: ShadowFinished) -> None:
    """Notes a shadow run. One of other tiers is left out."""
    if [answer.model for answer in body.answers] == [tier.model for tier in state.config.tiers]:
        state.shadows.append((body.arrival_ns, [answer.score for answer in body.answers[:-1]]))


def why_plan(state: CascadeState, now_ns: int) -> str:
    """Reason to start a planner now; empty for none. Looks once a period."""
    config = state.config
    rest_ns = config.pause_s * NS * 2 ** min(state.failures, 5)
    rested = not state.planned_ns or now_ns - state.planned_ns >= rest_ns
    if not config.plans or state.plan is None or state.plan.move is not None or state.why or not rested:
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
    empty = [tier.model for tier in state.plan.members if not tier.replicas]
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
    before = _shadow_scores(state, state.baseline.start_ns, state.baseline.until_ns)
    after = _shadow_scores(state, state.baseline.until_ns, now_ns)
    settings = DriftSettings(interval_s=state.config.period_s)
    found = detect_drift(_window(state.baseline, before), _window(current, after), settings)
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
        judge=_planned_judge(state, serving),
        sample=config.sample,
        rate=len(traffic.requests) / span_s,
        quality=config.quality,
        latency_s=config.latency_s,
        thresholds=[] if plan.quality is None else [tier.threshold for tier in plan.tiers[:-1]],
        planned_p95_s=plan.p95_ns / NS,
        judge_s=config.judge_s,
        drain_s=config.drain_s,
        cold_start_s=config.cold_start_s,
        horizon_s=config.horizon_s,
    )


def _planned_judge(state: CascadeState, serving: Serving) -> PlannedTier | None:
    """The judge's model, where it is no tier and some instance of it said what it is: without one confidence judges."""
    own = state.config.members[len(state.config.tiers) :]
    return planned_tier(own[0], serving.get(own[0].model, ()), state.records.get(own[0].model)) if own else None


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


def planned(
    config: CoordinatedCascade, plan: CascadePlan, result: PlanningResult, *, coordinator: str, why: str, now_ns: int
) -> CascadePlan | None:
    """The next plan; None where the one in force stays."""
    chosen, move = result.chosen, move_of(config, plan, result, now_ns)
    if chosen is None or (result.keep and move is None):
        return None
    thresholds = [*chosen.thresholds, 0.0]
    if len(thresholds) != len(plan.tiers):
        return None
    if result.keep:
        thresholds = [tier.threshold for tier in plan.tiers]
    tiers = [
        msgspec.structs.replace(tier, threshold=threshold, share=share)
        for tier, threshold, share in zip(plan.tiers, thresholds, chosen.shares, strict=True)
    ]
    return msgspec.structs.replace(
        plan,
        epoch=plan.epoch + 1,
        tiers=tiers,
        judge_tier=asked_judge(plan, chosen),
        quality=chosen.quality,
        quality_low=max(0.0, chosen.quality_low),
        p95_ns=round(chosen.p95_s * NS) if math.isfinite(chosen.p95_s) else 0,
        meets=result.meets,
        move=move,
        coordinator=coordinator,
        reason=f"{why}: {result.reason}{_move_text(config, result, begins=move is not None)}",
    )


def move_of(config: CoordinatedCascade, plan: CascadePlan, result: PlanningResult, now_ns: int) -> CascadeMove | None:
    """Move that a result asks for; None where it asks for none, or none is possible here."""
    wanted = result.move
    before = [sum(each.count for each in tier.replicas) for tier in plan.members]
    if wanted is None or not config.moves or plan.move is not None or sum(before[: len(plan.tiers)]) < 2:
        return None
    if len(wanted.instances) != len(config.members):
        return None
    bounds = zip(config.members, wanted.instances, strict=True)
    if any(tier.instances_max and count > tier.instances_max for tier, count in bounds):
        return None
    return planned_move(wanted, before, until_ns=now_ns + round(config.move_limit_s * NS), meets=True)


def _move_text(config: CoordinatedCascade, result: PlanningResult, *, begins: bool) -> str:
    if result.move is None:
        return ""
    counts = [f"{count} of {tier.model}" for tier, count in zip(config.members, result.move.instances, strict=False)]
    return f"; {'moving' if begins else 'worth a move'}: {', '.join(counts)}"


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


def _shadow_scores(state: CascadeState, start_ns: int, end_ns: int) -> list[Floats]:
    """Scores of the second and later tiers by shadow runs of requests that arrived within a span."""
    within = [scores for arrival_ns, scores in state.shadows if start_ns <= arrival_ns <= end_ns]
    tiers = range(1, len(state.config.tiers) - 1)
    return [np.array([row[tier] for row in within if row[tier] is not None], dtype=np.float64) for tier in tiers]


def _window(span: TrafficSpan, later_tiers: Sequence[Floats] = ()) -> TrafficWindow:
    """Requests of a span; a last bin that is not full is left out."""
    bins = max(0, (span.until_ns - span.start_ns) // BIN_NS)
    edges = span.start_ns + BIN_NS * np.arange(bins + 1)
    arrivals = np.array([one.arrival_ns for one in span.requests], dtype=np.int64)
    scores = [one.score for one in span.requests if one.score is not None]
    return TrafficWindow(
        counts=np.histogram(arrivals, bins=edges)[0].tolist() if bins else [],
        prompt_tokens=np.array([one.prompt_tokens for one in span.requests], dtype=np.int64),
        output_tokens=np.array([one.output_tokens for one in span.requests], dtype=np.int64),
        scores=[np.array(scores, dtype=np.float64), *later_tiers],
    )
