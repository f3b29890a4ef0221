"""The plan of a cascade that the coordinator publishes in the KV bucket ``cascade`` (key: name of the cascade)."""

from __future__ import annotations

import math

import msgspec

from millrace.contracts.message import Body

#: Scores and thresholds lie between 0 and this: 100 times the probability that an answer is right.
SCORE_MAX = 100.0


class ReplicaCount(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas of one shape in a tier.

    Attributes:
        tensor_parallel: GPUs that share each layer.
        pipeline_parallel: Stages of layers.
        count: Replicas.
        device: Kind of device, as in a cluster file's groups; empty for any.
    """

    tensor_parallel: int
    pipeline_parallel: int
    count: int
    device: str = ""


class CascadeTier(msgspec.Struct, frozen=True, kw_only=True):
    """One model of a cascade.

    Attributes:
        model: Served model name.
        threshold: Least score at which an answer of this tier is delivered, 0 to 100. 0 accepts every answer. The last
            tier's answer is delivered whatever its threshold.
        replicas: By shape; empty where the plan gives the tier no GPU, or nobody serves it now. Such a tier is skipped.
        awaited: Nobody serves it now, and an instance is expected: the plan has not left it empty. An answer below it
            is not the last tier's.
        share: Share of requests that the planner expects here, 0 to 1.
        p95_ns: 95th percentile of one attempt's latency that the planner expects; 0 for unknown.
    """

    model: str
    threshold: float = 0.0
    replicas: list[ReplicaCount] = []
    awaited: bool = False
    share: float = 0.0
    p95_ns: int = 0


class CascadeMove(msgspec.Struct, frozen=True, kw_only=True):
    """Instances that change their model, one at a time, and what holds once all have. Lists are by tier.

    Attributes:
        instances: In the end; 0 for a tier that shall be empty. Last those of the judge's model, where it is no tier.
        before: The same at the beginning; a move that is not done in time goes back. Empty for one that does.
        until_ns: It is given up then, unix ns.
        thresholds, shares, quality, quality_low, p95_ns: Of the plan on the new instances, as in CascadePlan; empty and
            unset to keep the present ones.
        meets: As in CascadePlan.
    """

    instances: list[int]
    before: list[int] = []
    until_ns: int
    thresholds: list[float] = []
    shares: list[float] = []
    quality: float | None = None
    quality_low: float | None = None
    p95_ns: int = 0
    meets: bool = True


class CascadePlan(Body, frozen=True, kw_only=True, tag="CascadePlan/1"):
    """Tiers of a cascade in rising order of cost, with their thresholds.

    Invariants, checked at construction and so on decoding (ValueError naming the field): at least one tier, each model
    once, thresholds within 0 to 100, counts positive.

    Attributes:
        cascade: Its name; clients give it as ``model``. It is not the name of a model.
        epoch: Rises by one with each change. A request is judged by the plan in force when its answer is judged.
        judge: Kind of judge: ``confidence``, ``llm``, ``verifier`` or ``external``.
        judge_tier: Model of this cluster that judges, for the kind ``llm``; ``share`` is in questions per request, and
            ``threshold`` means nothing. None where no model of this cluster does. It may be a tier, too.
        quality: Mean score that the planner expects of delivered answers, 0 to 100; None where nothing was judged yet.
        quality_low: Its lower 95 % confidence bound.
        p95_ns: End-to-end 95th percentile that the planner expects; 0 for unknown.
        meets: False where no plan reaches what is asked; this one is then the best found.
        move: Under way: who holds the cascade's lease carries it out. None where instances stay.
        coordinator: Name of the author.
        reason: One sentence: why this plan and not the one before.
    """

    cascade: str
    epoch: int
    tiers: list[CascadeTier]
    judge: str = "confidence"
    judge_tier: CascadeTier | None = None
    quality: float | None = None
    quality_low: float | None = None
    p95_ns: int = 0
    meets: bool = True
    move: CascadeMove | None = None
    coordinator: str = ""
    reason: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError where an invariant does not hold."""
        if not self.tiers:
            raise ValueError("tiers is empty: a cascade has one tier at least")
        models = [tier.model for tier in self.members]
        if repeated := [model for model in models if models.count(model) > 1]:
            raise ValueError(f"tiers name the model {repeated[0]} twice")
        if self.cascade in models:
            raise ValueError(f"cascade {self.cascade} has the name of one of its models")
        for tier in self.members:
            _check_tier(tier)
        if self.move is not None:
            _check_move(self.move, tiers=len(self.tiers), members=len(self.members))

    @property
    def members(self) -> list[CascadeTier]:
        """Tiers, and last the judge's model where it is no tier itself: all that have instances of their own."""
        judge = self.judge_tier
        return self.tiers if judge is None or judge.model in {t.model for t in self.tiers} else [*self.tiers, judge]


def _check_tier(tier: CascadeTier) -> None:
    if not (math.isfinite(tier.threshold) and 0.0 <= tier.threshold <= SCORE_MAX):
        raise ValueError(f"tier {tier.model}: threshold {tier.threshold} is not within 0 to {SCORE_MAX:g}")
    for replicas in tier.replicas:
        if min(replicas.tensor_parallel, replicas.pipeline_parallel, replicas.count) < 1:
            raise ValueError(f"tier {tier.model}: replicas need positive counts")


def _check_move(move: CascadeMove, *, tiers: int, members: int) -> None:
    for name, wanted in (("instances", members), ("before", members), ("thresholds", tiers), ("shares", tiers)):
        told = getattr(move, name)
        if len(told) != wanted and (told or name == "instances"):
            raise ValueError(f"move: {name} has {len(told)} entries for {wanted} tiers")
    if min([*move.instances, *move.before]) < 0 or not any(move.instances):
        raise ValueError("move: instances must not be negative, and one tier needs one")
    for threshold in move.thresholds:
        if not (math.isfinite(threshold) and 0.0 <= threshold <= SCORE_MAX):
            raise ValueError(f"move: threshold {threshold} is not within 0 to {SCORE_MAX:g}")
