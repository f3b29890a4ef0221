"""Judgement of an engine's 90th percentiles by outcomes: whether they are believed, and by how much they are moved.

Every token weighs the same, as in training: of the first estimates of all requests, most of them short, 97 % may hold
where 90 % of tokens are covered. `Coverage` judges the estimates as the engine made them: far from 90 % the head is of
another load or model, and is not believed. `P90Correction` moves the percentiles of one that is, until they cover 90 %
on the load that is there: a head is fitted to recorded requests, and a few hundred of them place a percentile within
three or four points only. `JudgedEstimates` has both for the requests of one engine.
"""

from __future__ import annotations

import math
from typing import NamedTuple

#: Shares of lengths at or below p90 between which p90 is one.
COVERED_MIN, COVERED_MAX = 0.80, 0.97
#: Estimates that must have come true, or not, before they are judged; before too high a share counts, which a good p90
#: reaches by chance over the first few; and after how many means one weighs half.
JUDGED_MIN = 50
JUDGED_HIGH_MIN = 200
JUDGED_HALF_LIFE = 500
#: Step of the correction, chosen on the tuning requests of millrace-nano; and its bounds, as a factor.
STEP = 0.01
FACTOR_MIN, FACTOR_MAX = 0.5, 2.0
#: Weight of one estimate at most, in means; and how fast the mean number of tokens behind an estimate is forgotten.
WEIGHT_MAX = 10.0
TOKENS_DECAY = 0.999
#: Estimates of one request that are judged: its first, and one each time its length has doubled.
WATCHED_MAX = 20


class TokenWeights:
    """Tokens that estimates stand for, in means of late."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._count = 0.0

    def weight(self, tokens: int) -> float:
        """Takes one estimate. Returns its weight, WEIGHT_MAX at most."""
        self._tokens = self._tokens * TOKENS_DECAY + max(1, tokens)
        self._count = self._count * TOKENS_DECAY + 1.0
        return min(WEIGHT_MAX, max(1, tokens) * self._count / self._tokens)


class Coverage:
    """Share of recent tokens whose sequence stayed within the p90 reported for them."""

    def __init__(self) -> None:
        self.judged = 0
        self._tokens = TokenWeights()
        self._weight = 0.0
        self._within = 0.0

    def judge(self, tokens: int, *, within: bool) -> None:
        """Takes one estimate that stood for so many tokens of a sequence that has ended."""
        self.judged += 1
        weight = self._tokens.weight(tokens)
        decay = 0.5 ** (weight / JUDGED_HALF_LIFE)
        self._weight = self._weight * decay + weight
        self._within = self._within * decay + weight * within

    @property
    def share(self) -> float | None:
        """The share; None before JUDGED_MIN estimates."""
        return self._within / self._weight if self.judged >= JUDGED_MIN else None

    @property
    def refusal(self) -> str:
        """Reason why these estimates are not believed; empty if they are."""
        share = self.share
        most = COVERED_MAX if self.judged >= JUDGED_HIGH_MIN else 1.0
        if share is None or COVERED_MIN <= share <= most:
            return ""
        return f"p90 covers {share:.0%} of tokens, should cover {COVERED_MIN:.0%} to {COVERED_MAX:.0%}"


class P90Correction:
    """Factor on the distance of p90 from the median, in logarithms, that makes p90 cover 90 % of tokens.

    Adaptive conformal inference (Gibbs and Candès 2021): each estimate that fails moves the factor up nine times as far
    as one that holds moves it down.
    """

    def __init__(self) -> None:
        self._log = 0.0
        self._tokens = TokenWeights()

    @property
    def factor(self) -> float:
        """Factor in force, FACTOR_MIN to FACTOR_MAX; 1 before the first outcome."""
        return math.exp(self._log)

    def judge(self, tokens: int, *, within: bool) -> None:
        """Takes one corrected estimate that stood for so many tokens of a sequence that has ended."""
        step = STEP * self._tokens.weight(tokens)
        moved = self._log + step * (-0.1 if within else 0.9)
        self._log = min(math.log(FACTOR_MAX), max(math.log(FACTOR_MIN), moved))

    def moved(self, p50: int, p90: int) -> int:
        """The p90 of a rest as corrected, tokens, no less than the median. Both at least 1."""
        if self._log == 0.0 or p90 <= p50:
            return p90
        low = math.log1p(p50)
        return max(p50, round(math.expm1(low + self.factor * (math.log1p(p90) - low))))


class _Watched(NamedTuple):
    """An estimate that will be judged, as it was made and as it was told: p90s of the whole output."""

    at: int
    p90: int
    told: int


class JudgedEstimates:
    """Estimates of one engine's requests."""

    def __init__(self) -> None:
        self.coverage = Coverage()
        self.correction = P90Correction()
        self._watched: dict[str, list[_Watched]] = {}

    def told(self, name: str, *, at: int, p50: int, p90: int, left: int) -> tuple[int, int] | None:
        """Expected length and p90 of a request's whole output, tokens; None while estimates are not believed.

        Args:
            at: Output tokens at which the estimate was made.
            p50, p90: Of the rest, tokens; at least 1, and p50 at most p90.
            left: Tokens that its bound leaves at that point.
        """
        corrected = max(p50, min(max(p90, left), self.correction.moved(p50, p90)))
        watched = self._watched.setdefault(name, [])
        if len(watched) < WATCHED_MAX and (not watched or at >= max(1, 2 * watched[-1].at)):
            watched.append(_Watched(at, at + p90, at + corrected))
        return None if self.coverage.refusal else (at + p50, at + corrected)

    def left(self, name: str, length: int, *, ended: bool) -> None:
        """A request left the engine with so many output tokens. ``ended``: by itself or at its bound; else it was
        cancelled or goes on elsewhere, and says nothing.
        """
        watched = self._watched.pop(name, [])
        believed = not self.coverage.refusal
        for index, each in enumerate(watched if ended else ()):
            tokens = (watched[index + 1].at if index + 1 < len(watched) else length) - each.at
            self.coverage.judge(tokens, within=length <= each.p90)
            if believed:
                self.correction.judge(tokens, within=length <= each.told)
