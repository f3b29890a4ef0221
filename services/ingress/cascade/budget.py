"""Escalation budget: lowers a tier's threshold where too large a share of its answers would be rejected. Pure."""

from __future__ import annotations

from collections import deque

#: Scores that are remembered per tier. The share's standard error is then at most 3 %.
SCORES_MAX = 256
#: Below so many scores a share says nothing.
SCORES_MIN = 20


class EscalationBudget:
    """Latest scores of one tier's answers; ``threshold`` is the planned one, or the one that keeps the share.

    An answer without a score counts as 0.
    """

    __slots__ = ("_scores", "_share_max", "_window_ns")

    def __init__(self, share_max: float, window_ns: int) -> None:
        self._share_max = share_max
        self._window_ns = window_ns
        self._scores: deque[tuple[int, float]] = deque(maxlen=SCORES_MAX)

    def note(self, score: float | None, now_ns: int) -> None:
        if self._share_max < 1.0:
            self._scores.append((now_ns, score or 0.0))

    def threshold(self, planned: float, now_ns: int) -> float:
        """The threshold in force now: at most ``share_max`` of the window's answers are below it."""
        if self._share_max >= 1.0:
            return planned
        while self._scores and now_ns - self._scores[0][0] > self._window_ns:
            self._scores.popleft()
        if len(self._scores) < SCORES_MIN:
            return planned
        ranked = sorted(score for _, score in self._scores)
        return min(planned, ranked[min(len(ranked) - 1, int(self._share_max * len(ranked)))])
