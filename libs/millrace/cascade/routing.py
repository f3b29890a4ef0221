"""Threshold routing of a judged sample: who reaches which tier, whose answer is delivered, how good it is.

Every request starts at the first tier; an answer of tier i that scores at least h_i is accepted, else the next tier is
asked; the last tier's answer is not judged.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence, Set
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
        tiers: Those that are asked, rising; the others are passed over.
        shares: By tier, the share of requests that reach it; the first is 1.
        quality: Mean of the delivered answers.
        quality_low: Lower confidence bound of the mean (one-sided 95 %).
    """

    thresholds: Thresholds
    reached: Booleans
    answered_by: Integers
    tiers: tuple[int, ...]
    shares: tuple[float, ...]
    quality: float
    quality_low: float


def route(
    sample: JudgedSample, thresholds: Thresholds, entry: Integers | None = None, *, tiers: Sequence[int] = ()
) -> Routed:
    """Apply thresholds.

    Args:
        thresholds: One per tier but the last.
        entry: (N,), the tier at which each request starts; None for the first.
        tiers: Those that are asked, rising, the last of which delivers whatever it answers; empty for all. The others
            are passed over, as ingress does with tiers that have no instance.

    Raises:
        ValueError: the number of thresholds or the shape of ``entry`` is wrong, or one starts above all ``tiers``.
    """
    if len(thresholds) != sample.tiers - 1:
        raise ValueError(f"{len(thresholds)} thresholds for {sample.tiers} tiers, needs {sample.tiers - 1}")
    starts = np.zeros(sample.count, dtype=np.int64) if entry is None else entry
    if starts.shape != (sample.count,):
        raise ValueError(f"entry has shape {starts.shape}, needs {(sample.count,)}")
    asked = tuple(tiers) or tuple(range(sample.tiers))
    if starts.max() > asked[-1]:
        raise ValueError(f"a request starts at tier {starts.max()}, the last one that is asked is {asked[-1]}")
    reached = np.zeros((sample.count, sample.tiers), dtype=np.bool_)
    open_ = np.ones(sample.count, dtype=np.bool_)
    answered = np.full(sample.count, asked[-1], dtype=np.int64)
    for tier in asked:
        reached[:, tier] = open_ & (starts <= tier)
        if tier < asked[-1]:
            accepted = reached[:, tier] & (sample.scores[:, tier] >= thresholds[tier])
            answered[accepted] = tier
            open_ = open_ & ~accepted
    delivered = sample.quality[np.arange(sample.count), answered]
    return Routed(
        thresholds=thresholds,
        reached=reached,
        answered_by=answered,
        tiers=asked,
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
    """Thresholds with which tier i (counted from 1) gets 1/i of all requests, as nearly as ties allow."""
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


def routings(sample: JudgedSample, most: int = 10, *, tiers: Sequence[int] = ()) -> list[Routed]:
    """Every distinct routing over a grid of at most ``most`` thresholds per tier, and the initial ones.

    Args:
        tiers: As for ``route``.
    """
    asked = tuple(tiers) or tuple(range(sample.tiers))
    grids: list[Set[float]] = [
        {*threshold_choices(sample.scores[:, tier], most), initial} if tier in asked[:-1] else {REJECT_ALL}
        for tier, initial in enumerate(initial_thresholds(sample))
    ]
    return _distinct(sample, grids, asked)


def routings_near(sample: JudgedSample, routed: Routed, *, grid: int, most: int) -> list[Routed]:
    """Every distinct routing between a grid's neighbours of another one's thresholds.

    Args:
        grid: Thresholds per tier of the grid that they are of.
        most: Thresholds tried per tier.
    """
    grids: list[Set[float]] = []
    for tier, value in enumerate(routed.thresholds):
        scores, coarse = sample.scores[:, tier], threshold_choices(sample.scores[:, tier], grid)
        below = max((each for each in coarse if each < value), default=-math.inf)
        above = min((each for each in coarse if each > value), default=math.inf)
        between = scores[(scores > below) & (scores < above)] if tier in routed.tiers[:-1] else scores[:0]
        grids.append({value, *(threshold_choices(between, most)[:-1] if len(between) else ())})
    return _distinct(sample, grids, routed.tiers)


def _distinct(sample: JudgedSample, grids: Sequence[Set[float]], tiers: Sequence[int]) -> list[Routed]:
    found: dict[bytes, Routed] = {}
    for thresholds in itertools.product(*(sorted(grid) for grid in grids)):
        routed = route(sample, thresholds, tiers=tiers)
        found.setdefault(identity(routed), routed)
    return list(found.values())


def identity(routed: Routed) -> bytes:
    """Equal for routings that do the same with each request."""
    return routed.reached.tobytes() + routed.answered_by.tobytes()
