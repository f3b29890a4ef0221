"""Share of an instance's time that prompts take, by their length: what stages below and above a boundary prefill. Pure.

A sequence that is new among the running ones, and did not come with its KV, has been prefilled here.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence

from millrace.contracts.status import SequenceStatus
from millrace.policies.stages.digest import BINS, STARTS

#: A prompt of so long ago weighs 1/e, seconds.
DECAY_S = 30.0


class PromptWork:
    """Shares of one instance, as an exponential mean."""

    def __init__(self) -> None:
        self._spent_s = [0.0] * BINS
        self._known: Collection[str] | None = None
        self._began_ns = 0
        self._at_ns = 0

    def look(
        self,
        running: Sequence[SequenceStatus],
        moved: Collection[str],
        prompt_s: Callable[[int, int], float],
        now_ns: int,
    ) -> None:
        """Takes the running sequences; those of the first look have come before.

        Args:
            running: In the engine.
            moved: Sequences that came with their KV.
            prompt_s: Seconds that a prompt of so many tokens (second) adds to steps of so many decodes (first).
            now_ns: Unix ns, rising.
        """
        names = frozenset(status.sequence for status in running)
        if self._known is None:
            self._known, self._began_ns, self._at_ns = names, now_ns, now_ns
            return
        kept = math.exp(-(now_ns - self._at_ns) / 1e9 / DECAY_S)
        self._spent_s = [spent * kept for spent in self._spent_s]
        for status in running:
            if status.sequence not in self._known and status.sequence not in moved:
                index = bisect_right(STARTS, status.prompt_tokens) - 1
                self._spent_s[index] += prompt_s(max(1, len(running) - 1), status.prompt_tokens)
        self._known, self._at_ns = names, now_ns

    def shares(self) -> list[float]:
        """Per bin of the digest, 0 to 1; bins behind the last one given are empty."""
        passed_s = (self._at_ns - self._began_ns) / 1e9
        if passed_s <= 0:
            return []
        window_s = DECAY_S * (1 - math.exp(-passed_s / DECAY_S))
        used = max((index + 1 for index in range(BINS) if self._spent_s[index] > 0), default=0)
        return [min(1.0, spent / window_s) for spent in self._spent_s[:used]]
