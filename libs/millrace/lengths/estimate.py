"""Estimate of a length model, and the interface that makes models interchangeable."""

from __future__ import annotations

import math
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

#: One request as numbers, in the order of ``features.FEATURES``; float64.
Row = NDArray[np.float64]

#: Longer outputs than this are not believed, tokens: a damaged message, not an answer.
LENGTH_MAX = 10_000_000


class LengthEstimate(msgspec.Struct, frozen=True):
    """Expected output length of one choice, tokens; p50 <= p90."""

    mean: float
    p50: float
    p90: float

    def within(self, low: int, high: int) -> LengthEstimate:
        """The same inside a request's bounds (``min_tokens``, ``max_tokens``), in order."""
        top = float(max(1, high))
        floor = min(float(max(1, low)), top)
        p50 = min(max(self.p50, floor), top)
        return LengthEstimate(min(max(self.mean, floor), top), p50, min(max(self.p90, p50), top))

    def finite(self) -> bool:
        return all(math.isfinite(value) and 0 <= value <= LENGTH_MAX for value in (self.mean, self.p50, self.p90))


class LengthModel(Protocol):
    """Predicts from features alone. An implementation never changes its state here and never raises."""

    def estimate(self, row: Row) -> LengthEstimate | None:
        """The expectation; None where the model has nothing to go by."""
        ...


class LearningModel(LengthModel, Protocol):
    """One that learns from each outcome as it comes."""

    def learn(self, row: Row, length: int) -> None:
        """Takes one real output length, tokens."""
        ...
