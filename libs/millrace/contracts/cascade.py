"""The plan of a cascade that the coordinator publishes in the KV bucket ``cascade`` (key: name of the cascade)."""

from __future__ import annotations

import math

import msgspec

from millrace.contracts.message import Body

#: Scores and thresholds lie between 0 and this: 100 times the probability that an answer is right.
SCORE_MAX = 100.0


class CascadeTier(msgspec.Struct, frozen=True, kw_only=True):
    """One model of a cascade.

    Attributes:
        model: Served model name.
        threshold: Least score at which an answer of this tier is delivered, 0 to 100. 0 accepts every answer. The last
            tier's answer is delivered whatever its threshold.
        instances: That serve it now. A tier without one is skipped.
        awaited: Not served now, but an instance is expected: the plan has not left it empty. An answer below it
            is not the last tier's.
        share: Share of requests that the planner expects here, 0 to 1.
        p95_ns: 95th percentile of one attempt's latency that the planner expects; 0 for unknown.
    """

    model: str
    threshold: float = 0.0
    instances: int = 0
    awaited: bool = False
    share: float = 0.0
    p95_ns: int = 0


class FrontPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Thresholds of a cascade that no others, of all that the planner tried, beat in both quality and latency.

    Attributes:
        thresholds: Of each tier but the last, 0 to 100.
        instances: Of each tier.
        shares: Of requests that reach each tier, 0 to 1.
        quality, quality_low: Mean score expected of delivered answers, 0 to 100, and its lower 95 % confidence bound.
        p95_s: End-to-end 95th percentile.
    """

    thresholds: list[float]
    instances: list[int]
    shares: list[float]
    quality: float
    quality_low: float
    p95_s: float


class CascadePlan(Body, frozen=True, kw_only=True, tag="CascadePlan/1"):
    """Tiers of a cascade in rising order of cost, with their thresholds.

    Invariants, checked at construction and so on decoding (ValueError naming the field): at least one tier, each model
    once, thresholds within 0 to 100, counts positive.

    Attributes:
        cascade: Its name; clients give it as ``model``. It is not the name of a model.
        epoch: Rises by one with each change. A request is judged by the plan in force when its answer is judged.
        judge: ``confidence``, which ingress computes, or the name of the judge that is asked.
        quality: Mean score that the planner expects of delivered answers, 0 to 100; None where nothing was judged yet.
        quality_low: Its lower 95 % confidence bound.
        p95_ns: End-to-end 95th percentile that the planner expects; 0 for unknown.
        meets: False where no plan reaches what is asked; this one is then the best found.
        coordinator: Name of the author.
        reason: One sentence: why this plan and not the one before.
        front: What the planner had to choose from, by rising latency; empty where it chose nothing.
    """

    cascade: str
    epoch: int
    tiers: list[CascadeTier]
    judge: str = "confidence"
    quality: float | None = None
    quality_low: float | None = None
    p95_ns: int = 0
    meets: bool = True
    coordinator: str = ""
    reason: str = ""
    front: list[FrontPoint] = []

    def __post_init__(self) -> None:
        if not self.tiers:
            raise ValueError("tiers is empty: a cascade has one tier at least")
        models = [tier.model for tier in self.tiers]
        if repeated := [model for model in models if models.count(model) > 1]:
            raise ValueError(f"tiers name the model {repeated[0]} twice")
        if self.cascade in models:
            raise ValueError(f"cascade {self.cascade} has the name of one of its models")
        for tier in self.tiers:
            _check_tier(tier)


def _check_tier(tier: CascadeTier) -> None:
    if not (math.isfinite(tier.threshold) and 0.0 <= tier.threshold <= SCORE_MAX):
        raise ValueError(f"tier {tier.model}: threshold {tier.threshold} is not within 0 to {SCORE_MAX:g}")
    if tier.instances < 0:
        raise ValueError(f"tier {tier.model}: instances must not be negative")
