"""The evidence about an answer that costs nothing: the log-probabilities of its own tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Booleans = NDArray[np.bool_]

#: Log-probability below which a token is as unlikely as float32 can say; infinities are no evidence.
LEAST_LOGPROB = -30.0

#: Share of the least likely tokens that count for ``LOW_MEAN``.
LOW_SHARE = 0.1


class ConfidenceFeature(StrEnum):
    """A number made of an answer's log-probabilities; higher is better."""

    SUM = "sum"  # log-probability of the whole answer
    LEAST = "least"  # of its least likely token
    LOW_MEAN = "low_mean"  # mean of the least likely tenth
    MEAN = "mean"  # mean of all

    @property
    def only_falls(self) -> bool:
        """Whether more tokens can only lower it, so that a running value bounds the final one."""
        return self in (ConfidenceFeature.SUM, ConfidenceFeature.LEAST)


def usable(logprobs: Sequence[float]) -> list[float] | None:
    """The log-probabilities with infinities bounded; None where there is none, or one is no log-probability.

    Plain Python: answers are short, and making an array of them costs more than adding them up.
    """
    if not logprobs or max(logprobs) > 1e-6 or any(map(math.isnan, logprobs)):
        return None
    if min(logprobs) >= LEAST_LOGPROB:
        return list(logprobs)
    return [max(value, LEAST_LOGPROB) for value in logprobs]


def feature_of(feature: ConfidenceFeature, logprobs: Sequence[float]) -> float | None:
    """The feature of one answer; None where its log-probabilities are not usable."""
    values = usable(logprobs)
    if values is None:
        return None
    match feature:
        case ConfidenceFeature.SUM:
            return math.fsum(values)
        case ConfidenceFeature.LEAST:
            return min(values)
        case ConfidenceFeature.LOW_MEAN:
            count = max(1, math.ceil(LOW_SHARE * len(values)))
            return math.fsum(sorted(values)[:count]) / count
        case ConfidenceFeature.MEAN:
            return math.fsum(values) / len(values)


class RunningEvidence(msgspec.Struct):
    """Evidence of an answer that is still being generated, token by token.

    Attributes:
        total: Sum of log-probabilities so far.
        least: Of the least likely token so far.
    """

    total: float = 0.0
    least: float = 0.0
    tokens: int = 0

    def add(self, logprobs: Sequence[float]) -> None:
        """Count some tokens in. One that is no log-probability counts as the least likely one."""
        for logprob in logprobs:
            bounded = logprob if LEAST_LOGPROB <= logprob <= 0 else (LEAST_LOGPROB if not 0 < logprob <= 1e-6 else 0.0)
            self.total += bounded
            self.least = min(self.least, bounded)
            self.tokens += 1

    def value(self, feature: ConfidenceFeature) -> float | None:
        """Upper bound of the final feature; None for a feature that may rise again."""
        if not feature.only_falls:
            return None
        return self.total if feature is ConfidenceFeature.SUM else self.least
