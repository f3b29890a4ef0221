"""Threshold routing of a judged sample: who reaches which tier, whose answer is delivered, how good it is.

Source: Cascadia, section 3.3: every request starts at the first tier; an answer of tier i that scores at least h_i is
accepted, else the next tier is asked; the last tier's answer is not judged.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from millrace.cascade.sample import Booleans, Floats, Integers, JudgedSample

Thresholds = tuple[float, ...]

#: A threshold that no score reaches: every answer of the tier is escalated.
REJECT_ALL = math.inf

#: One-sided 95 % quantile of the normal distribution.
CONFIDENCE_DEVIATIONS = 1.645


@dataclass(frozen=True, eq=False)
class Routed:
    """Result of applying a set of thresholds to a sample.

    Attributes:
        reached: (N, C): the tiers that each request runs on.
        answered_by: (N,): the tier whose answer is delivered.
        shares: By tier, the share of requests that reach it; the first is 1.
        quality: Mean of the delivered answers.
        quality_low: Lower confidence bound of the mean (one-sided 95 %).
    """

    thresholds: Thresholds
    reached: Booleans
    answered_by: Integers
    shares: tuple[float, ...]
    quality: float
    quality_low: float


def route(sample: JudgedSample, thresholds: Thresholds, entry: Integers | None = None) -> Routed:
    """Apply thresholds.

    Args:
        thresholds: One per tier but the last.
        entry: (N,), the tier at which each request starts; None for the first.

    Raises:
        ValueError: the number of thresholds or the shape of ``entry`` is wrong.
    """
    if len(thresholds) != sample.tiers - 1:
        raise ValueError(f"{len(thresholds)} thresholds for {sample.tiers} tiers, needs {sample.tiers - 1}")
    starts = np.zeros(sample.count, dtype=np.int64) if entry is None else entry
    if starts.shape != (sample.count,):
        raise ValueError(f"entry has shape {starts.shape}, needs {(sample.count,)}")
    reached = np.zeros((sample.count, sample.tiers), dtype=np.bool_)
    open_ = starts == 0
    answered = np.full(sample.count, sample.tiers - 1, dtype=np.int64)
    for tier in range(sample.tiers):
        open_ = open_ | (starts == tier)
        reached[:, tier] = open_
        if tier < sample.tiers - 1:
            accepted = open_ & (sample.scores[:, tier] >= thresholds[tier])
            answered[accepted] = tier
            open_ = open_ & ~accepted
    delivered = sample.quality[np.arange(sample.count), answered]
    return Routed(
        thresholds=thresholds,
        reached=reached,
        answered_by=answered,
        shares=tuple(float(share) for share in reached.mean(axis=0)),
        quality=float(delivered.mean()),
        quality_low=_lower_bound(delivered),
    )


def _lower_bound(values: Floats) -> float:
    """Lower end of the one-sided 95 % interval of the mean; 0 of a single value, which says nothing."""
    if len(values) < 2:
        return 0.0
    return float(values.mean() - CONFIDENCE_DEVIATIONS * values.std(ddof=1) / math.sqrt(len(values)))


def initial_thresholds(sample: JudgedSample) -> Thresholds:
    """Thresholds with which tier i (counted from 1) gets 1/i of all requests, as nearly as ties allow.

    Source: Cascadia, section 3.3 (θ0).
    """
    thresholds: list[float] = []
    open_ = np.ones(sample.count, dtype=np.bool_)
    for tier in range(sample.tiers - 1):
        scores = sample.scores[:, tier]
        wanted = 1 / (tier + 2)
        choices = (*np.unique(scores[open_]).tolist(), REJECT_ALL)
        best = min(choices, key=lambda value: abs(float((open_ & (scores < value)).mean()) - wanted))
        thresholds.append(best)
        open_ = open_ & (scores < best)
    return tuple(thresholds)


def threshold_choices(scores: Floats, most: int) -> tuple[float, ...]:
    """Thresholds that accept different sets, thinned to about ``most`` evenly spaced quantiles.

    The smallest accepts every answer, the last one none.
    """
    distinct = np.unique(scores)
    if len(distinct) > most - 1:
        positions = np.linspace(0, len(scores) - 1, most - 1).round().astype(int)
        distinct = np.unique(np.sort(scores)[positions])
    return (*(float(value) for value in distinct), REJECT_ALL)


def routings(sample: JudgedSample, most: int = 10, entry: Integers | None = None) -> list[Routed]:
    """Every distinct routing over a grid of at most ``most`` thresholds per tier, and the initial ones."""
    grids = [
        {*threshold_choices(sample.scores[:, tier], most), initial}
        for tier, initial in enumerate(initial_thresholds(sample))
    ]
    found: dict[bytes, Routed] = {}
    for thresholds in itertools.product(*(sorted(grid) for grid in grids)):
        routed = route(sample, thresholds, entry)
        found.setdefault(routed.reached.tobytes() + routed.answered_by.tobytes(), routed)
    return list(found.values())
