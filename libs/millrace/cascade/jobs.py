"""One planning of a live cascade: from its present instances, its rate and a recorded sample to thresholds.

Two speeds: thresholds for the present instances may come into force at once; instances of other models are only said to
be better where the simulated gain over the horizon exceeds draining and cold starts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from millrace.cascade.capacity import NO_REPLICAS, TierDeployment
from millrace.cascade.judge_tier import JudgeTier, question_tokens
from millrace.cascade.planner import JUDGED_REQUESTS_MIN, CascadeDesign, CascadePlanner, CascadeProblem
from millrace.cascade.recorded import recorded_sample
from millrace.cascade.replanning import MoveCost, Replan, outdated, replan, simulated_under
from millrace.cascade.replicas import ReplicaModel, ReplicaShape
from millrace.cascade.sample import JudgedSample
from millrace.contracts.cascade import SCORE_MAX, CascadeMove, CascadePlan, CascadeTier
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
        judge: Model that judges, where it has instances of its own; it needs no ``judge`` file. None for none.
        sample: File of recorded answers.
        rate: Requests/s.
        quality, latency_s: The target; one of them.
        thresholds: In force, one per tier but the last; empty for none. They stay unless others are better.
        planned_p95_s: p95 that was expected of them; 0 for unknown.
        judge_s: What judging an answer takes, besides the verdict of ``judge``.
        drain_s, cold_start_s, horizon_s: As MoveCost has them.
    """

    tiers: list[PlannedTier]
    judge: PlannedTier | None = None
    sample: str
    rate: float
    quality: float | None = None
    latency_s: float | None = None
    thresholds: list[float] = []
    planned_p95_s: float = 0.0
    judge_s: float = 0.001
    drain_s: float = 30.0
    cold_start_s: float = 30.0
    horizon_s: float = 600.0

    @property
    def members(self) -> list[PlannedTier]:
        """Tiers, and last the judge's model where there is one."""
        return self.tiers if self.judge is None else [*self.tiers, self.judge]


class FrontPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A design that no other beats in both quality and latency.

    Attributes:
        instances: Of each tier, and last of the judge's model where the job has one.
        questions: To the judge's model per request.
        verdict_s: p95 of its verdicts.
    """

    thresholds: list[float]
    instances: list[int]
    shares: list[float]
    quality: float
    quality_low: float
    p95_s: float
    questions: float = 0.0
    verdict_s: float = 0.0


class PlanningResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of planning one cascade.

    Attributes:
        keep: Why the thresholds in force still fit; empty where others are better.
        chosen: For the present instances; None where no thresholds serve the traffic on them.
        meets: Whether it reaches the target.
        reason: One sentence.
        move: Design whose instances are worth a move; None to keep them.
        front: Every design on the front, by rising p95, if asked for.
    """

    chosen: FrontPoint | None
    meets: bool
    reason: str
    keep: str = ""
    move: FrontPoint | None = None
    front: list[FrontPoint] = []


def plan_job(job: PlanningJob, step_times: Mapping[str, StepTimeModel], *, front: bool = False) -> PlanningResult:
    """Plan one cascade. Reads the sample and the judges; seconds of CPU.

    Raises:
        ValueError: a file is unreadable or of other models, or a step-time set is not here.
        OSError: a file cannot be read.
    """
    planner = CascadePlanner(problem_of(job, step_times), ReplicaModel())
    *present, judge = _present(job, planner.problem)
    told = replan(
        planner,
        present,
        MoveCost(drain_s=job.drain_s, cold_start_s=job.cold_start_s, horizon_s=job.horizon_s),
        in_force=tuple(job.thresholds) or None,
        judge=judge,
    )
    designs = planner.front() if front else []
    points = _not_beaten(_point(each, planner) for each in designs)
    change = _change(job, planner, [*present, judge])
    few = _few(planner.problem.sample.count)
    chosen = _point(told.at_once, planner) if told.at_once is not None else None
    move = _point(told.move, planner) if told.move is not None else None
    return msgspec.structs.replace(_result(told, change, few), chosen=chosen, move=move, front=points)


def _present(job: PlanningJob, problem: CascadeProblem) -> list[TierDeployment]:
    """Instances that serve, of each tier and last of the judge's model."""
    counts = zip(problem.shapes, job.tiers, strict=True)
    tiers = [_deployment(shapes[0], tier.instances) for shapes, tier in counts]
    if job.judge is None or problem.judge is None:
        return [*tiers, NO_REPLICAS]
    return [*tiers, _deployment(problem.judge.shapes[0], job.judge.instances)]


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
    sample = _sample(job)
    judge = None
    if job.judge is not None:
        judge = JudgeTier(shapes=[_shape(job.judge, step_times)], tokens=question_tokens(sample))
    return CascadeProblem(
        sample=sample,
        rate=job.rate,
        gpus=sum(tier.instances * tier.tensor_parallel for tier in job.members),
        shapes=[[_shape(tier, step_times)] for tier in job.tiers],
        judge_s=[job.judge_s] * (len(job.tiers) - 1),
        quality_min=job.quality,
        latency_max_s=job.latency_s,
        thresholds_most=THRESHOLDS_MOST,
        judge=judge,
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


def _change(job: PlanningJob, planner: CascadePlanner, present: Sequence[TierDeployment]) -> str:
    """Return the reason why the plan in force no longer fits the traffic; empty where it does. ``present``: the judge's
    replicas last.
    """
    if not job.thresholds:
        return ""
    *tiers, judge = present
    now = simulated_under(planner, tuple(job.thresholds), tiers, judge)
    if now is None:
        return "no tier has an instance"
    planned = replace(now, p95_s=job.planned_p95_s or now.p95_s)
    return outdated(planner, planned)


def _result(told: Replan, change: str, few: str) -> PlanningResult:
    """Text and verdict of a decision; its points are set by the caller."""
    chosen = told.at_once
    said = [change, chosen.reason if chosen is not None else "", told.reason, few]
    reason = "; ".join(each for each in said if each)
    keep = ""
    if chosen is not None and told.kept:
        keep = f"quality {chosen.routed.quality:.1f} and p95 {chosen.p95_s:.2f} s; {reason}"
    return PlanningResult(chosen=None, meets=chosen is not None and chosen.meets, reason=reason, keep=keep)


def planned_move(point: FrontPoint, before: Sequence[int], *, until_ns: int, meets: bool) -> CascadeMove:
    """Move of a plan to a design.

    Args:
        before: Instances of each tier now.
    """
    return CascadeMove(
        instances=point.instances,
        before=list(before),
        until_ns=until_ns,
        thresholds=[*point.thresholds, 0.0],
        shares=point.shares,
        quality=point.quality,
        quality_low=max(0.0, point.quality_low),
        p95_ns=round(point.p95_s * 1e9),
        meets=meets,
    )


def asked_judge(plan: CascadePlan, point: FrontPoint) -> CascadeTier | None:
    """The judge's model as a plan has it, with the questions and verdicts that a design expects."""
    judge = plan.judge_tier
    if judge is None:
        return None
    return msgspec.structs.replace(judge, share=point.questions, p95_ns=round(point.verdict_s * 1e9))


def _counts(design: CascadeDesign, *, judged: bool) -> list[int]:
    members = design.members if judged else design.deployments
    return [sum(count for _, count in each.replicas) for each in members]


def _point(design: CascadeDesign, planner: CascadePlanner) -> FrontPoint:
    routed, problem = design.routed, planner.problem
    return FrontPoint(
        # A threshold that no score reaches is the highest that a plan can say.
        thresholds=[min(value, SCORE_MAX) for value in routed.thresholds],
        instances=_counts(design, judged=problem.judge is not None),
        shares=list(routed.shares),
        quality=routed.quality,
        quality_low=routed.quality_low,
        p95_s=design.p95_s if math.isfinite(design.p95_s) else 0.0,
        questions=planner.judge_tier(routed).rate / problem.rate,
        verdict_s=design.judge_latency_s,
    )
