"""One planning of a live cascade: from its present instances, its rate and a recorded sample to thresholds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import permutations
from pathlib import Path

import msgspec

from millrace.cascade.chain import equal_instances
from millrace.cascade.recorded import recorded_sample
from millrace.cascade.sample import JudgedSample
from millrace.cascade.thresholds import (
    GAIN,
    JUDGED_REQUESTS_MIN,
    ChosenThresholds,
    ThresholdDesign,
    ThresholdPlanner,
    ThresholdProblem,
)
from millrace.contracts.cascade import SCORE_MAX, FrontPoint
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.registered import load_step_times
from millrace.enginemodel.step_cost import StepCost
from millrace.enginemodel.step_time_models import StepTimeModel
from millrace.judging.files import read_judge

#: Thresholds tried per tier: 12 by 12 routings of three tiers are some seconds of one core.
THRESHOLDS_MOST = 12

#: Other divisions of the instances that are tried where a front is asked for.
DIVISIONS_MAX = 12

#: Of a longer front every second or third point is kept: it is part of a plan, and is looked at.
FRONT_MOST = 32


class PlannedTier(msgspec.Struct, frozen=True, kw_only=True):
    """A tier as planning needs it.

    Attributes:
        recorded: Its name in the recording; empty for the served one.
        judge: File of its confidence judge; empty for the last tier.
        parameters: Of an instance's scheduler.
        instances: Serving now.
    """

    model: str
    step_time: str
    parameters: EngineParameters
    instances: int
    recorded: str = ""
    judge: str = ""


class PlanningJob(msgspec.Struct, frozen=True, kw_only=True):
    """Input of planning one cascade.

    Attributes:
        tiers: Smallest model first.
        sample: File of recorded answers.
        rate: Requests/s.
        quality, latency_s: The target; one of them.
        thresholds: In force, one per tier but the last; empty for none. They stay unless others are better.
        planned_p95_s: p95 that was expected of them; 0 for unknown.
        judge_s: What judging an answer takes.
    """

    tiers: list[PlannedTier]
    sample: str
    rate: float
    quality: float | None = None
    latency_s: float | None = None
    thresholds: list[float] = []
    planned_p95_s: float = 0.0
    judge_s: float = 0.001


class PlanningResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of planning one cascade.

    Attributes:
        keep: Why the thresholds in force still fit; empty where others are better.
        chosen: For the present instances; None where no thresholds serve the traffic on them.
        best: With the same number of instances divided in the best way, if asked for; None where nothing serves.
        front: Of the present instances, by rising p95; of every division of as many, if asked for.
    """

    chosen: FrontPoint | None
    meets: bool
    reason: str
    keep: str = ""
    best: FrontPoint | None = None
    front: list[FrontPoint] = []


def plan_job(job: PlanningJob, step_times: Mapping[str, StepTimeModel], *, front: bool = False) -> PlanningResult:
    """Plan one cascade. Reads the sample and the judges; seconds of CPU.

    Raises:
        ValueError: a file is unreadable or of other models, or a step-time set is not here.
        OSError: a file cannot be read.
    """
    problem, costs = problem_of(job), [_cost(tier, step_times) for tier in job.tiers]
    counts = tuple(tier.instances for tier in job.tiers)
    planner = _on(job, problem, costs, counts)
    found = planner.choose(tuple(job.thresholds) or None)
    change = planner.outdated(tuple(job.thresholds), job.planned_p95_s or None) if job.thresholds else ""
    result = _result(found, counts, change, _few(problem.sample.count))
    if not front:
        return result
    seen, best = _divided(job, problem, costs, counts)
    points = _not_beaten(_point(each, division) for division, designs in seen.items() for each in designs)
    return msgspec.structs.replace(result, best=best, front=points)


def plan_in_child(job: PlanningJob) -> PlanningResult:
    """The same in a process of its own. Raises ValueError, OSError: as ``plan_job``."""
    files = {tier.step_time: tier.step_time for tier in job.tiers if tier.step_time.endswith(".toml")}
    return plan_job(job, load_step_times(files)[0])


def _on(
    job: PlanningJob, problem: ThresholdProblem, costs: Sequence[StepCost], counts: Sequence[int]
) -> ThresholdPlanner:
    rows = zip(job.tiers, costs, counts, strict=True)
    return ThresholdPlanner(problem, [equal_instances(count, cost, tier.parameters) for tier, cost, count in rows])


def _divided(
    job: PlanningJob, problem: ThresholdProblem, costs: Sequence[StepCost], counts: tuple[int, ...]
) -> tuple[dict[tuple[int, ...], list[ThresholdDesign]], FrontPoint | None]:
    """Designs of divisions of as many instances, on a way of falling p95 from the present one, and the last of it."""
    seen = {counts: _on(job, problem, costs, counts).designs()}
    best, at = problem.best(seen[counts]), counts
    while True:
        for division in _shifts(at):
            if division in seen or len(seen) > DIVISIONS_MAX:
                continue
            seen[division] = _on(job, problem, costs, division).designs()
            other = problem.best(seen[division])
            if other is not None and (best is None or _ahead(problem, other, best)):
                best, at = other, division
                break
        else:
            return seen, _point(best, at) if best is not None else None


def _ahead(problem: ThresholdProblem, other: ThresholdDesign, best: ThresholdDesign) -> bool:
    """Whether another division is better by more than what does not hold for other requests."""
    if other.meets != best.meets:
        return other.meets
    if problem.quality_min is not None and best.meets:
        return other.p95_s <= (1 - GAIN) * best.p95_s
    return problem.best([best, other]) == other


def _shifts(counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Divisions with one instance of a tier in another one."""
    for source, target in permutations(range(len(counts)), 2):
        if counts[source]:
            given = list(counts)
            given[source] -= 1
            given[target] += 1
            yield tuple(given)


def _not_beaten(points: Iterable[FrontPoint]) -> list[FrontPoint]:
    """By rising p95, those with more quality than every faster one: allocation has left some that simulation beats.
    At most FRONT_MOST of them.
    """
    kept: list[FrontPoint] = []
    for point in sorted(points, key=lambda each: (each.p95_s, -each.quality)):
        if not kept or point.quality > kept[-1].quality:
            kept.append(point)
    return kept[:: 1 + len(kept) // FRONT_MOST]


def _few(judged: int) -> str:
    """Warning of a small sample; empty for one that is large enough."""
    if judged >= JUDGED_REQUESTS_MIN:
        return ""
    return f"the sample has {judged} judged requests, and with fewer than {JUDGED_REQUESTS_MIN} quality is uncertain"


def problem_of(job: PlanningJob) -> ThresholdProblem:
    """The planner's problem.

    Raises:
        ValueError, OSError: as ``plan_job``.
    """
    return ThresholdProblem(
        sample=_sample(job),
        rate=job.rate,
        judge_s=[job.judge_s] * (len(job.tiers) - 1),
        quality_min=job.quality,
        latency_max_s=job.latency_s,
        thresholds_most=THRESHOLDS_MOST,
    )


def _sample(job: PlanningJob) -> JudgedSample:
    missing = [tier.model for tier in job.tiers[:-1] if not tier.judge]
    if missing:
        raise ValueError(f"{missing[0]} has no judge; `millrace train judge` fits one")
    judges = [read_judge(Path(tier.judge)) for tier in job.tiers[:-1]]
    return recorded_sample(Path(job.sample), [tier.recorded or tier.model for tier in job.tiers], judges)


def _cost(tier: PlannedTier, step_times: Mapping[str, StepTimeModel]) -> StepCost:
    model = step_times.get(tier.step_time)
    if model is None:
        raise ValueError(f"step times of {tier.model}: no set {tier.step_time!r} here")
    return model.cost(tier.parameters)


def _result(found: ChosenThresholds, counts: Sequence[int], change: str, few: str) -> PlanningResult:
    chosen = found.design
    if chosen is None:
        reason = "; ".join(filter(None, (change, "no thresholds serve the traffic", few)))
        return PlanningResult(chosen=None, meets=False, reason=reason)
    reason = "; ".join(filter(None, (change, chosen.reason, few)))
    keep = f"quality {chosen.routed.quality:.1f} and p95 {chosen.p95_s:.2f} s; {reason}" if found.kept else ""
    front = _not_beaten(_point(each, counts) for each in found.designs)
    return PlanningResult(chosen=_point(chosen, counts), meets=chosen.meets, reason=reason, keep=keep, front=front)


def _point(design: ThresholdDesign, counts: Sequence[int]) -> FrontPoint:
    routed = design.routed
    return FrontPoint(
        # A threshold that no score reaches is the highest that a plan can say.
        thresholds=[min(value, SCORE_MAX) for value in routed.thresholds],
        instances=list(counts),
        shares=list(routed.shares),
        quality=routed.quality,
        quality_low=routed.quality_low,
        p95_s=design.p95_s if math.isfinite(design.p95_s) else 0.0,
    )
