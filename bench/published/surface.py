"""Measured times over two sizes, and straight lines between them; all times in ns."""

from __future__ import annotations

import itertools

import msgspec
from millrace.enginemodel.measured import MeasuredCurve


class Surface(msgspec.Struct, frozen=True):
    """A measured time over two sizes: one profile for each value of the first.

    Attributes:
        rows: The first size, rising.
        profiles: Over the second size.
    """

    rows: tuple[int, ...]
    profiles: tuple[MeasuredCurve, ...]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in itertools.pairwise(self.rows))
        if not self.rows or len(self.rows) != len(self.profiles) or not rising:
            raise ValueError("a surface needs at least one row, rising rows, and a profile for each")

    def at(self, row: float, size: float) -> float:
        """Time, ns: straight lines between rows and within them."""
        return MeasuredCurve(self.rows, tuple(profile.at(size) for profile in self.profiles)).at(row)

    def sizes(self) -> tuple[int, ...]:
        """All second sizes that were measured in any row."""
        return tuple(sorted({size for profile in self.profiles for size in profile.sizes}))
