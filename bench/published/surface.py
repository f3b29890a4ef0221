"""Measured times over one size or two, and straight lines between them; all times in ns."""

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


class Surface(msgspec.Struct, frozen=True):
    """A measured time over two sizes: one profile for each value of the first.

    Attributes:
        rows: The first size, rising.
        profiles: Over the second size.
    """

    rows: tuple[int, ...]
    profiles: tuple[MeasuredCurve, ...]

    def at(self, row: float, size: float) -> float:
        """Time, ns: straight lines between rows and within them."""
        return MeasuredCurve(self.rows, tuple(profile.at(size) for profile in self.profiles)).at(row)

    def sizes(self) -> tuple[int, ...]:
        """All second sizes that were measured in any row."""
        return tuple(sorted({size for profile in self.profiles for size in profile.sizes}))
