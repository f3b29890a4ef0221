"""Measured times over sizes, and straight lines between them. Pure; all times in ns."""

from __future__ import annotations

import itertools
from bisect import bisect_right

import msgspec


class MeasuredCurve(msgspec.Struct, frozen=True):
    """A measured time over one size; in between, straight lines, and beyond the ends the last line goes on.

    Attributes:
        sizes: Rising.
        ns: As many.
    """

    sizes: tuple[int, ...]
    ns: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in itertools.pairwise(self.sizes))
        if not self.sizes or len(self.sizes) != len(self.ns) or not rising:
            raise ValueError("a profile needs at least one size, rising sizes, and a time for each")

    def at(self, size: float) -> float:
        """Time at a size, ns, never below 0."""
        if len(self.sizes) == 1:
            return self.ns[0]
        right = min(max(bisect_right(self.sizes, size), 1), len(self.sizes) - 1)
        if size < self.sizes[0]:
            return self.ns[0]
        left = right - 1
        share = (size - self.sizes[left]) / (self.sizes[right] - self.sizes[left])
        return max(0.0, self.ns[left] + share * (self.ns[right] - self.ns[left]))
