"""Histograms that actors count into: plain figures without a metrics library, shown to Prometheus by collectors.

``prometheus_client``'s own objects cost 1 to 2 µs per observation (labels, locks); here it is one bisect and two
additions, cheap enough for one observation per token chunk. Nothing is shared between two actors of a process.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

_NS = 1e9


class Histogram:
    """Counts of plain numbers in fixed buckets.

    Attributes:
        sum: Of all observations.
    """

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """Counts nothing yet.

        Args:
            bounds: Upper bounds of the buckets, ascending; one more bucket holds what is above the last.
        """
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Counts one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        """Observations so far."""
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Pairs of (upper bound, observations at or below it), as Prometheus wants them."""
        return _cumulative(self._bounds, self._counts)


class LatencyHistogram:
    """Counts of durations in nanoseconds, told in seconds."""

    __slots__ = ("_bounds_ns", "_bounds_s", "_counts", "_sum_ns")

    def __init__(self, bounds_s: Sequence[float]) -> None:
        """Counts nothing yet.

        Args:
            bounds_s: Upper bounds of the buckets in seconds, ascending; one more bucket holds what is above the last.
        """
        self._bounds_s = tuple(bounds_s)
        self._bounds_ns = [int(bound * _NS) for bound in bounds_s]
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_ns = 0

    def observe(self, duration_ns: int) -> None:
        """Counts one duration."""
        self._counts[bisect_left(self._bounds_ns, duration_ns)] += 1
        self._sum_ns += duration_ns

    @property
    def count(self) -> int:
        """Observations so far."""
        return sum(self._counts)

    @property
    def mean_ns(self) -> float:
        """Mean of all observations, 0 without any."""
        return self._sum_ns / max(1, self.count)

    def buckets(self) -> list[tuple[str, float]]:
        """Pairs of (upper bound in seconds, observations at or below it), as Prometheus wants them."""
        return _cumulative(self._bounds_s, self._counts)

    def sum_s(self) -> float:
        """Sum of all observations, seconds."""
        return self._sum_ns / _NS


def _cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    total = 0
    pairs: list[tuple[str, float]] = []
    for bound, count in zip((*map(str, bounds), "+Inf"), counts, strict=True):
        total += count
        pairs.append((bound, float(total)))
    return pairs
