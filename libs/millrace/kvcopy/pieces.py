"""A plan handed out in slices that fit what a copier may take at once. Pure; used by NIXL."""

from __future__ import annotations

import numpy as np

from millrace.kvcopy.copier_port import CopyPlan


class Slices:
    """Walks over a plan by bytes; a piece may be divided between two slices."""

    def __init__(self, plan: CopyPlan) -> None:
        self._plan = plan
        self._ends = np.cumsum(plan.lengths)
        self._given = 0
        self._bytes = int(self._ends[-1]) if len(self._ends) else 0

    @property
    def left(self) -> int:
        """Bytes not handed out yet."""
        return self._bytes - self._given

    def take(self, *, bytes_max: int, pieces_max: int) -> CopyPlan:
        """The next slice: at most so many bytes and pieces, at least one byte. Only where ``left`` is above 0."""
        assert self.left > 0
        assert min(bytes_max, pieces_max) > 0
        first = int(np.searchsorted(self._ends, self._given, side="right"))
        wanted_end = min(self._given + bytes_max, self._bytes)
        stop = min(int(np.searchsorted(self._ends, wanted_end, side="left")) + 1, first + pieces_max)
        end = min(wanted_end, int(self._ends[stop - 1]))
        taken = _between(self._plan, first, stop)
        skipped = self._given - int(self._ends[first] - self._plan.lengths[first])
        taken.source[0] += skipped
        taken.target[0] += skipped
        taken.lengths[0] -= skipped
        taken.lengths[-1] -= int(self._ends[stop - 1]) - end
        self._given = end
        return taken


def _between(plan: CopyPlan, first: int, stop: int) -> CopyPlan:
    return CopyPlan(
        source=plan.source[first:stop].copy(),
        target=plan.target[first:stop].copy(),
        lengths=plan.lengths[first:stop].copy(),
    )
