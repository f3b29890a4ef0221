"""Scores turned into probabilities: isotonic calibration, and how good a judge is."""

from __future__ import annotations

import math
from bisect import bisect_right

import msgspec
import numpy as np

from millrace.judging.evidence import Booleans, Floats

#: Bins of the calibration error.
BINS = 10


class IsotonicCurve(msgspec.Struct, frozen=True):
    """A rising map from a raw score to a probability, straight lines between its knots.

    Attributes:
        scores: Rising.
        probabilities: Of the same length, rising, 0 to 1.
    """

    scores: tuple[float, ...]
    probabilities: tuple[float, ...]

    def __post_init__(self) -> None:
        scores, values = np.array(self.scores), np.array(self.probabilities)
        if len(scores) < 1 or len(scores) != len(values):
            raise ValueError("an isotonic curve needs as many probabilities as scores, and at least one")
        if not (np.diff(scores) > 0).all() or not (np.diff(values) >= 0).all():
            raise ValueError("scores and probabilities of an isotonic curve must rise")
        if values[0] < 0 or values[-1] > 1:
            raise ValueError("probabilities of an isotonic curve must lie in 0 to 1")

    def least(self, probability: float) -> float:
        """Smallest raw score of at least that probability; minus infinity where all have it, infinity where none."""
        if probability <= self.probabilities[0]:
            return -math.inf
        if probability > self.probabilities[-1]:
            return math.inf
        return float(np.interp(probability, self.probabilities, self.scores))

    def at_one(self, score: float) -> float:
        """Probability of one raw score; as ``at``, for a tenth of its cost."""
        knots, values = self.scores, self.probabilities
        above = bisect_right(knots, score)
        if above == 0 or above == len(knots):
            return values[max(0, above - 1)]
        share = (score - knots[above - 1]) / (knots[above] - knots[above - 1])
        return values[above - 1] + share * (values[above] - values[above - 1])

    def at(self, scores: Floats) -> Floats:
        """Probabilities of raw scores, of the same shape."""
        return np.interp(scores, self.scores, self.probabilities)


def fit_isotonic(scores: Floats, right: Booleans) -> IsotonicCurve:
    """The rising curve of least squared error.

    Args:
        scores: (n,), finite.
        right: (n,), whether each answer was right.

    Raises:
        ValueError: no scores.
    """
    if not len(scores):
        raise ValueError("calibration needs at least one judged answer")
    from scipy.optimize import isotonic_regression  # scipy takes a second to import; a fitted curve needs none of it

    order = np.argsort(scores, kind="stable")
    unique, first = np.unique(scores[order], return_index=True)
    counts = np.diff([*first, len(scores)])
    means = np.add.reduceat(right[order].astype(np.float64), first) / counts
    fitted = np.clip(isotonic_regression(means, weights=counts).x, 0.0, 1.0)
    # Only the ends of each level are needed.
    changes = np.flatnonzero(np.diff(fitted)) if len(fitted) > 1 else np.array([], dtype=np.int64)
    kept = np.unique(np.concatenate([[0], changes, changes + 1, [len(unique) - 1]])).astype(int)
    return IsotonicCurve(tuple(unique[kept].tolist()), tuple(np.maximum.accumulate(fitted[kept]).tolist()))


def area_under_curve(scores: Floats, right: Booleans) -> float:
    """Probability that a right answer scores above a wrong one; ties count half; 0.5 with one kind only."""
    rights, wrongs = int(right.sum()), int((~right).sum())
    if not rights or not wrongs:
        return 0.5
    from scipy.stats import rankdata  # scipy takes a second to import; a fitted curve needs none of it

    ranks = rankdata(scores)
    return float((ranks[right].sum() - rights * (rights + 1) / 2) / (rights * wrongs))


def calibration_error(probabilities: Floats, right: Booleans) -> float:
    """Expected calibration error over equally filled bins, 0 to 1."""
    order = np.argsort(probabilities, kind="stable")
    parts = [part for part in np.array_split(order, BINS) if len(part)]
    gaps = [abs(float(probabilities[part].mean() - right[part].mean())) * len(part) for part in parts]
    return sum(gaps) / len(order)
