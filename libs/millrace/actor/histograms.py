"""Histograms that actors count into: plain figures without a metrics library, shown to Prometheus by collectors.

``prometheus_client``'s own objects cost 1 to 2 µs per observation (labels, locks); here it is one bisect and two
additions, cheap enough for one observation per token chunk. Nothing is shared between two actors of a process.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

_NS = 1e9


class Histogram:
    """Counts of plain numbers in fixed buckets."""

    __slots__ = ("_bounds", "_counts", "_shown", "_sum", "_unit")

    def __init__(self, bounds: Sequence[float], unit: float = 1) -> None:
        """Counts nothing yet.

        Args:
            bounds: Upper bounds of the buckets, ascending; one more bucket holds what is above the last.
            unit: Of the bounds, in that of the values which are counted.
        """
        self._shown = tuple(map(str, bounds))
        self._bounds = [bound * unit for bound in bounds]
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._unit = unit

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def count(self) -> int:
        return sum(self._counts)

    @property
    def sum(self) -> float:
        """Of all observations, in the unit of the bounds."""
        return self._sum / self._unit

    def buckets(self) -> list[tuple[str, float]]:
        """Pairs of (upper bound, observations at or below it), as Prometheus wants them."""
        return list(zip((*self._shown, "+Inf"), map(float, accumulate(self._counts)), strict=True))


class LatencyHistogram(Histogram):
    """Counts of durations in nanoseconds, told in seconds, as its bounds are."""

    __slots__ = ()

    def __init__(self, bounds_s: Sequence[float]) -> None:
        super().__init__(bounds_s, _NS)

    @property
    def mean_ns(self) -> float:
        """Mean of all observations, 0 without any."""
        return self._sum / max(1, self.count)
