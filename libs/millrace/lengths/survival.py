"""Remaining output lengths given what was generated, learnt online from outcomes alone.

A Kaplan-Meier estimator on log-spaced bins: for each bin of lengths, how many sequences reached it and how many of them
ended in it. A sequence that ``max_tokens``, a cancellation or a migration took away counts as long as it was seen; one
that arrived with tokens counts from there on. So each instance learns correctly from its own part of every life, and
many short outputs do not hide the few long ones that are under way.

No content is looked at. This is the baseline of every other predictor of remaining lengths, and what answers where
those have nothing to say. Source: Kaplan and Meier, 1958; differs in the decay, and in the prior below, which answers
beyond the longest output seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Numbers = NDArray[np.float64]

#: Lengths below this have a bin each; above, BINS_PER_OCTAVE of them (1.6 % wide at most).
EXACT = 128
BINS_PER_OCTAVE = 64
#: Octaves above EXACT: lengths up to 2^24 tokens; longer ones count in the last bin.
OCTAVES = 17
#: Outcomes after which one weighs half: a change of traffic shows within minutes at one request a second.
HALF_LIFE = 2_000
#: Weight of the prior, in outcomes. Its hazard is 1 / length: what outran everything seen lasts as long again.
PRIOR = 1.0
#: Fewer outcomes than this say nothing.
OUTCOMES_MIN = 20
#: Curves are computed anew when this share of the weight is new, so that the work is spread over many outcomes.
RENEWAL = 1 / 64
#: Rests that are kept until the next curve: sequences of like length ask for the same ones.
RESTS_MAX = 4_096
#: Weights are rescaled before they leave what a float holds exactly.
_WEIGHT_MAX = 1e9
_SHARES = (0.5, 0.9)
_RESTS = 1.0 - np.asarray(_SHARES)[:, None]


def _edges() -> NDArray[np.int64]:
    """First length of each bin, and the end of the last."""
    wide = [(EXACT << octave) + (step << octave + 1) for octave in range(OCTAVES) for step in range(BINS_PER_OCTAVE)]
    return np.array([*range(EXACT), *wide, EXACT << OCTAVES], np.int64)


EDGES = _edges()
BINS = len(EDGES) - 1
#: Lengths after which the survival of a curve is reported: the last length of the bin before.
_POINTS = (EDGES - 1).astype(np.float64)
_PRIOR_HAZARD = 1.0 - EDGES[:-1] / EDGES[1:]
_PRIOR_HAZARD[0] = 0.0


def bin_of(length: int) -> int:
    """Index of the bin that holds an output length, tokens."""
    if length < EXACT:
        return max(0, length)
    octave = min(length.bit_length() - EXACT.bit_length(), OCTAVES - 1)
    step = (length - (EXACT << octave)) >> octave + 1
    return EXACT + BINS_PER_OCTAVE * octave + min(step, BINS_PER_OCTAVE - 1)


class Rest(NamedTuple):
    """Tokens that a sequence has still to generate; 1 <= p50 <= p90."""

    p50: int
    p90: int


class Survival:
    """Distribution of one model's output lengths. Memory is constant: five arrays of BINS numbers.

    Attributes:
        outcomes: Sequences learnt from, those seen in part included.
    """

    def __init__(self, *, half_life: float = HALF_LIFE, prior: float = PRIOR) -> None:
        self.outcomes = 0
        self._growth = 2.0 ** (1.0 / half_life)
        self._prior = prior
        self._weight = 1.0
        self._entered = np.zeros(BINS)
        self._left = np.zeros(BINS)
        self._ended = np.zeros(BINS)
        self._total = 0.0
        self._new = 0.0
        self._curve: Numbers | None = None
        self._totals = np.zeros((len(_SHARES), 0))  # of bins up to the longest that was asked for
        self._reach = EXACT
        self._rests: dict[int, Rest] = {}  # of the present curve

    def learn(self, length: int, *, entered: int = 0, ended: bool = True) -> None:
        """Takes one sequence. One that was seen for no token teaches nothing.

        Args:
            length: Output tokens when it was last seen.
            entered: Output tokens that it had when it was first seen.
            ended: Whether it ended there by itself; False where it was cut, cancelled or moved away.
        """
        entered = min(entered, length - 1) if ended else entered
        if length < 1 or entered < 0 or entered >= length:
            return
        self.outcomes += 1
        self._weight *= self._growth
        self._entered[bin_of(entered + 1)] += self._weight
        last = bin_of(length)
        self._left[last] += self._weight
        if ended:
            self._ended[last] += self._weight
        self._total += self._weight
        self._new += self._weight
        if self._weight > _WEIGHT_MAX:
            self._rescale()

    def _rescale(self) -> None:
        for counts in (self._entered, self._left, self._ended):
            counts /= self._weight
        self._total /= self._weight
        self._new /= self._weight
        self._weight = 1.0

    def quantiles(self, generated: ArrayLike, shares: Sequence[float]) -> Numbers:
        """Quantiles of the rest, tokens, shape (sequences, shares); at least one token.

        Args:
            generated: Output tokens of each sequence so far, shape (sequences,).
        """
        counts = np.asarray(generated, np.float64)
        level = _survival(self.curve(), counts)[:, None] * (1.0 - np.asarray(shares))
        return np.maximum(1.0, np.ceil(_lengths(self.curve(), level) - 1e-9) - counts[:, None])

    def rest(self, generated: int) -> Rest | None:
        """Median and 90th percentile of the rest, from a table. None while too little was learnt."""
        if self.outcomes < OUTCOMES_MIN:
            return None
        if self._curve is None or self._new > RENEWAL * self._total:
            self.curve()
        known = self._rests.get(generated)
        if known is None:
            if len(self._rests) >= RESTS_MAX:
                self._rests.clear()
            known = self._rests[generated] = self._read(generated)
        return known

    def _read(self, generated: int) -> Rest:
        low = bin_of(generated + 1)
        if low + 2 > self._reach:
            self._reach = 2 * low
            self._totals = _lengths(self.curve(), _RESTS * self.curve()[: self._reach])
        part = (generated - _POINTS_LIST[low]) / (_POINTS_LIST[low + 1] - _POINTS_LIST[low])
        part = min(part, 1.0)
        # A table of Python's floats would take longer to make than most are read.
        p50, p90 = [at + part * (after - at) for at, after in self._totals[:, low : low + 2].tolist()]
        median = max(1, ceil(p50 - 1e-9) - generated)
        return Rest(median, max(median, ceil(p90 - 1e-9) - generated))

    def curve(self) -> Numbers:
        """Probability of an output longer than ``EDGES - 1`` tokens, falling from 1, shape (BINS + 1,)."""
        if self._curve is None or self._new > RENEWAL * self._total:
            self._new = 0.0
            self._curve = curve = self._computed()
            self._totals = _lengths(curve, _RESTS * curve[: self._reach])
            self._rests.clear()
        return self._curve

    def _computed(self) -> Numbers:
        at_risk = (np.cumsum(self._entered) - np.cumsum(self._left) + self._left) / self._weight
        at_risk = np.maximum(at_risk, 0.0) + self._prior
        hazard = (self._ended / self._weight + self._prior * _PRIOR_HAZARD) / at_risk
        return np.concatenate(([1.0], np.cumprod(1.0 - np.minimum(hazard, 1.0 - 1e-12))))


_POINTS_LIST: list[float] = _POINTS.tolist()


def _survival(curve: Numbers, lengths: Numbers) -> Numbers:
    """Probability of an output longer than ``lengths``; linear inside a bin."""
    return np.interp(lengths, _POINTS, curve)


def _lengths(curve: Numbers, levels: Numbers) -> Numbers:
    """Least length whose survival has fallen to each level; linear inside a bin, at most the last point."""
    return np.interp(levels, curve[::-1], _POINTS[::-1])
