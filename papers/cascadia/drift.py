"""Tests of whether traffic still is what a cascade was planned for: rate, lengths, scores.

A significant difference that is small changes no plan, so each test asks for a least size of the change too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt
from scipy import stats

Values = npt.NDArray[np.float64] | npt.NDArray[np.int64]

DAY_S = 86_400.0

#: Fewer bins or values on either side say too little: the test is left out.
BINS_MIN = 5
VALUES_MIN = 20

#: Variance of the square root of a Poisson count. Bursty arrivals have more, and it is estimated; none have less.
ROOT_VARIANCE = 0.25


class DriftKind(StrEnum):
    """Quantity that changed."""

    RATE = "rate"
    PROMPT_TOKENS = "prompt_tokens"
    OUTPUT_TOKENS = "output_tokens"
    SCORES = "scores"


@dataclass(frozen=True, kw_only=True, eq=False)
class TrafficWindow:
    """Traffic of a cascade in one time window.

    Attributes:
        counts: Requests that arrived in each bin, in order; bins of a window, and of both windows that are compared,
            are equally long.
        prompt_tokens: (n,), of requests.
        output_tokens: (n,), of answers of the first tier: later ones see what thresholds pass on.
        scores: By tier but the last, the scores of its answers. Only the first tier's are a fair sample where later
            tiers see what thresholds pass on; leave out what was not sampled alike in both windows.
    """

    counts: Sequence[int]
    prompt_tokens: Values
    output_tokens: Values
    scores: Sequence[Values] = ()


@dataclass(frozen=True, kw_only=True)
class DriftSettings:
    """Settings of the drift alarm: interval, false alarms, and the least changes that count.

    Attributes:
        interval_s: Time between two checks.
        alarms_per_day: False alarms of stationary traffic, at most, in expectation.
        rate_change: Least change of the mean rate that counts, as a share of the old one.
        distance: Least distance of two distributions that counts (Kolmogorov-Smirnov, 0 to 1).
    """

    interval_s: float = 60.0
    alarms_per_day: float = 1.0
    rate_change: float = 0.15
    distance: float = 0.1

    def significance(self, tests: int) -> float:
        """Largest p-value that counts, of each of so many tests (Bonferroni over the tests of a day)."""
        return min(0.05, self.alarms_per_day * self.interval_s / (DAY_S * tests))


@dataclass(frozen=True, kw_only=True)
class DriftFinding:
    """One test that found a change.

    Attributes:
        tier: Of the scores; 0 for the other kinds.
        p_value: How likely at least such a difference is without a change.
        size: Relative change of the rate, or distance of the distributions.
    """

    kind: DriftKind
    p_value: float
    size: float
    tier: int = 0

    def text(self) -> str:
        """For example ``rate +42 % (p = 1e-06)``."""
        if self.kind is DriftKind.RATE:
            return f"rate {self.size:+.0%} (p = {self.p_value:.1g})"
        where = f" of tier {self.tier + 1}" if self.kind is DriftKind.SCORES else ""
        return f"{self.kind}{where} moved by {self.size:.2f} (p = {self.p_value:.1g})"


def detect_drift(
    planned: TrafficWindow, current: TrafficWindow, settings: DriftSettings | None = None
) -> tuple[DriftFinding, ...]:
    """Changes between the traffic that was planned for and the present one; empty for none.

    Rates: Welch's test on square roots of bin counts, with at least the variance of Poisson arrivals. Lengths and
    scores: Kolmogorov-Smirnov, which ties make conservative. The two windows must not overlap.
    """
    settings = settings or DriftSettings()
    found = [
        _rate(planned.counts, current.counts),
        _distance(DriftKind.PROMPT_TOKENS, planned.prompt_tokens, current.prompt_tokens),
        _distance(DriftKind.OUTPUT_TOKENS, planned.output_tokens, current.output_tokens),
        *(
            _distance(DriftKind.SCORES, before, after, tier=tier)
            for tier, (before, after) in enumerate(zip(planned.scores, current.scores, strict=False))
        ),
    ]
    significance = settings.significance(len(found))
    return tuple(each for each in found if each is not None and _counts(each, significance, settings))


def _counts(finding: DriftFinding, significance: float, settings: DriftSettings) -> bool:
    least = settings.rate_change if finding.kind is DriftKind.RATE else settings.distance
    return finding.p_value <= significance and abs(finding.size) >= least


def _rate(before: Sequence[int], after: Sequence[int]) -> DriftFinding | None:
    if min(len(before), len(after)) < BINS_MIN:
        return None
    roots = [np.sqrt(np.asarray(counts, dtype=np.float64)) for counts in (before, after)]
    shares = [max(ROOT_VARIANCE, float(each.var(ddof=1))) / len(each) for each in roots]
    freedom = sum(shares) ** 2 / sum(share**2 / (len(each) - 1) for share, each in zip(shares, roots, strict=True))
    statistic = float(roots[1].mean() - roots[0].mean()) / math.sqrt(sum(shares))
    mean = float(np.mean(before))
    size = float(np.mean(after)) / mean - 1 if mean > 0 else math.inf
    return DriftFinding(kind=DriftKind.RATE, p_value=2 * float(stats.t.sf(abs(statistic), freedom)), size=size)


def _distance(kind: DriftKind, before: Values, after: Values, *, tier: int = 0) -> DriftFinding | None:
    if min(len(before), len(after)) < VALUES_MIN:
        return None
    tested = stats.ks_2samp(before, after, method="asymp")
    return DriftFinding(kind=kind, p_value=float(tested.pvalue), size=float(tested.statistic), tier=tier)
