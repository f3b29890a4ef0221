"""Configuration of a cascade that the coordinator plans. Durations are seconds here and nanoseconds in the code."""

from __future__ import annotations

import math

import msgspec
from millrace.contracts.cascade import SCORE_MAX


class CoordinatedTier(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tier.

    Attributes:
        model: Served name.
        threshold: In force until a plan says otherwise, 0 to 100.
        judge: File of its confidence judge; planning from a sample needs one of every tier but the last.
        instances: At the start; 0 for a tier that begins empty.
    """

    model: str
    threshold: float = 70.0
    judge: str = ""
    instances: int = 1


class CoordinatedCascade(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cascade that the coordinator writes plans of.

    Attributes:
        name: Clients ask for it as ``model``.
        tiers: In rising order of cost.
        judge: Kind of judge.
        quality: Mean quality that plans keep, 0 to 100; None for the configured thresholds, or for ``latency_s``.
        latency_s: p95 that plans keep; None where ``quality`` is given.
        sample: File of recorded answers of all tiers, with the truth.
        period_s: How often it is looked at whether the plan still fits.
        pause_s: Least time between two plans.
        window_s: Outcomes that ended longer ago say nothing.
    """

    name: str
    tiers: list[CoordinatedTier]
    judge: str = "confidence"
    quality: float | None = None
    latency_s: float | None = None
    sample: str = ""
    period_s: float = 60.0
    pause_s: float = 120.0
    window_s: float = 600.0

    def __post_init__(self) -> None:
        models = [tier.model for tier in self.tiers]
        if not models or self.name in models or len(set(models)) < len(models):
            raise ValueError(f"tiers of {self.name}: one at least, each model once, and none of the cascade's name")
        for tier in self.tiers:
            if not (math.isfinite(tier.threshold) and 0 <= tier.threshold <= SCORE_MAX):
                raise ValueError(f"threshold {tier.threshold} of {tier.model} is not within 0 to {SCORE_MAX:g}")
        if self.quality is not None and self.latency_s is not None:
            raise ValueError("quality and latency_s exclude each other")
        if self.plans and not self.sample:
            raise ValueError("a target needs sample")

    @property
    def plans(self) -> bool:
        """Whether thresholds follow from a target."""
        return self.quality is not None or self.latency_s is not None
