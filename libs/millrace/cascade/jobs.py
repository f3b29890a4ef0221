"""One planning of a live cascade: from its present instances, its rate and a recorded sample to thresholds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from millrace.cascade.capacity import NO_REPLICAS, TierDeployment
from millrace.cascade.planner import JUDGED_REQUESTS_MIN, CascadeDesign, CascadePlanner, CascadeProblem
from millrace.cascade.recorded import recorded_sample
from millrace.cascade.replicas import ReplicaModel, ReplicaShape
from millrace.cascade.sample import JudgedSample
from millrace.cascade.thresholds import ChosenThresholds, choose_thresholds, outdated, simulated_under
from millrace.contracts.cascade import SCORE_MAX
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_time_models import StepTimeModel
from millrace.judging.files import read_judge

#: Thresholds tried per tier: 12 by 12 routings of three tiers are some seconds of one core.
THRESHOLDS_MOST = 12


class PlannedTier(msgspec.Struct, frozen=True, kw_only=True):
    """A tier as planning needs it.

    Attributes:
        model: Served name.
        recorded: Its name in the recording; empty for the served one.
        judge: File of its confidence judge; empty for the last tier.
        step_time: Step-time set of its instances.
        parameters: Of an instance's scheduler.
        instances: Serving now.
        tensor_parallel: GPUs of an instance.
    """

    model: str
    step_time: str
    parameters: EngineParameters
    instances: int
    recorded: str = ""
    judge: str = ""
    tensor_parallel: int = 1


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


class FrontPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A design that no other beats in both quality and latency.

    Attributes:
        instances: Of each tier.
    """

    thresholds: list[float]
    instances: list[int]
    shares: list[float]
    quality: float
    quality_low: float
    p95_s: float


class PlanningResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of planning one cascade.

    Attributes:
        keep: Why the thresholds in force still fit; empty where others are better.
        chosen: For the present instances; None where no thresholds serve the traffic on them.
        meets: Whether it reaches the target.
        reason: One sentence.
        best: With the same number of instances divided in the best way, if asked for; None where nothing serves.
        front: Every design on the front, by rising p95, if asked for.
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
    planner = CascadePlanner(problem_of(job, step_times), ReplicaModel())
    counts = zip(planner.problem.shapes, job.tiers, strict=True)
    present = [_deployment(shapes[0], tier.instances) for shapes, tier in counts]
    found = choose_thresholds(planner, present, in_force=tuple(job.thresholds) or None)
    best = planner.plan() if front else None
    points = _not_beaten(_point(each) for each in planner.front()) if front else []
    result = _result(found, _change(job, planner, present), _few(planner.problem.sample.count))
    return msgspec.structs.replace(result, best=_point(best) if best is not None else None, front=points)


def _not_beaten(points: Iterable[FrontPoint]) -> list[FrontPoint]:
    """By rising p95, those with more quality than every faster one: allocation has left some that simulation beats."""
    kept: list[FrontPoint] = []
    for point in sorted(points, key=lambda each: (each.p95_s, -each.quality)):
        if not kept or point.quality > kept[-1].quality:
            kept.append(point)
    return kept


def _few(judged: int) -> str:
    """Warning of a small sample; empty for one that is large enough."""
    if judged >= JUDGED_REQUESTS_MIN:
        return ""
    return f"the sample has {judged} judged requests, and with fewer than {JUDGED_REQUESTS_MIN} quality is uncertain"


def problem_of(job: PlanningJob, step_times: Mapping[str, StepTimeModel]) -> CascadeProblem:
    """The planner's problem.

    Raises:
        ValueError, OSError: as ``plan_job``.
    """
    return CascadeProblem(
        sample=_sample(job),
        rate=job.rate,
        gpus=sum(tier.instances * tier.tensor_parallel for tier in job.tiers),
        shapes=[[_shape(tier, step_times)] for tier in job.tiers],
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


def _shape(tier: PlannedTier, step_times: Mapping[str, StepTimeModel]) -> ReplicaShape:
    model = step_times.get(tier.step_time)
    if model is None:
        raise ValueError(f"step times of {tier.model}: no set {tier.step_time!r} here")
    return ReplicaShape(tensor=tier.tensor_parallel, cost=model.cost(tier.parameters), parameters=tier.parameters)


def _deployment(shape: ReplicaShape, count: int) -> TierDeployment:
    """So many equal replicas, which take turns."""
    return TierDeployment(((shape, count),), (1.0,)) if count else NO_REPLICAS


def _change(job: PlanningJob, planner: CascadePlanner, present: list[TierDeployment]) -> str:
    """Return the reason why the plan in force no longer fits the traffic; empty where it does."""
    if not job.thresholds:
        return ""
    now = simulated_under(planner, tuple(job.thresholds), present)
    if now is None:
        return "no tier has an instance"
    return outdated(planner, replace(now, p95_s=job.planned_p95_s or now.p95_s))


def _result(found: ChosenThresholds, change: str, few: str) -> PlanningResult:
    chosen = found.design
    if chosen is None:
        reason = "; ".join(filter(None, (change, "no thresholds serve the traffic", few)))
        return PlanningResult(chosen=None, meets=False, reason=reason)
    reason = "; ".join(filter(None, (change, chosen.reason, few)))
    keep = f"quality {chosen.routed.quality:.1f} and p95 {chosen.p95_s:.2f} s; {reason}" if found.kept else ""
    return PlanningResult(chosen=_point(chosen), meets=chosen.meets, reason=reason, keep=keep)


def _point(design: CascadeDesign) -> FrontPoint:
    routed = design.routed
    return FrontPoint(
        # A threshold that no score reaches is the highest that a plan can say.
        thresholds=[min(value, SCORE_MAX) for value in routed.thresholds],
        instances=[sum(count for _, count in each.replicas) for each in design.deployments],
        shares=list(routed.shares),
        quality=routed.quality,
        quality_low=routed.quality_low,
        p95_s=design.p95_s if math.isfinite(design.p95_s) else 0.0,
    )
