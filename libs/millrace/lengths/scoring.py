"""Scores of predictions: errors, shares within bounds, pinball losses, with confidence intervals. Lengths in tokens."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one model on one set.

    Attributes:
        error: Mean absolute error of the point prediction.
        error_rate: That divided by the mean length.
        relative_error: Mean of |error| / length; short answers weigh as much as long ones.
        acc_50, acc_100: Share of errors below 50 and 100 tokens.
        pinball: Mean of the pinball losses at 0.5 and 0.9.
        covered_90: Share of lengths at or below p90; 0.9 is right.
    """

    count: int
    error: float
    error_rate: float
    relative_error: float
    acc_50: float
    acc_100: float
    pinball: float
    covered_90: float


def score(predicted: Numbers, lengths: Numbers, *, point: int = 1) -> Score:
    """Scores (outcomes, 3) predictions: mean, p50, p90.

    Args:
        point: Column taken as the point prediction; the median minimises the absolute error, so it is the default.
    """
    errors = np.abs(predicted[:, point] - lengths)
    return Score(
        count=len(lengths),
        error=float(errors.mean()),
        error_rate=float(errors.mean() / lengths.mean()),
        relative_error=float((errors / lengths).mean()),
        acc_50=float((errors < 50).mean()),
        acc_100=float((errors < 100).mean()),
        pinball=float(pinball(predicted, lengths).mean()),
        covered_90=float((lengths <= predicted[:, 2]).mean()),
    )


def pinball(predicted: Numbers, lengths: Numbers) -> Numbers:
    """Pinball loss of each outcome, averaged over the quantiles 0.5 and 0.9."""
    total = np.zeros(len(lengths))
    for column, share in ((1, 0.5), (2, 0.9)):
        above = lengths - predicted[:, column]
        total += np.maximum(share * above, (share - 1.0) * above)
    return total / 2.0


def interval(values: Numbers, *, seed: int, draws: int = 1_000) -> tuple[float, float]:
    """95 % confidence interval of a mean, by bootstrap over outcomes."""
    rng = np.random.default_rng(seed)
    means = values[rng.integers(0, len(values), (draws, len(values)))].mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)
