"""Runs of equal decode steps, computed at once: what step by step gives, in one go.

While every running sequence decodes, none ends, none can be admitted and blocks last, a step differs from the one
before only in that each context is one token longer. A run covers such steps up to and including the first in which a
sequence ends. Times are exact: step costs are integers (step_cost.py), and their sum has a closed form where the cost
is linear in the context.
"""

from __future__ import annotations

from millrace.contracts.status import BatchComposition
from millrace.enginemodel.step_cost import FS_PER_NS, StepCost, after
from millrace.enginemodel.stream import ModelledSequence


class DecodeRun:
    """Steps that are under way together.

    Attributes:
        first: Composition of the first step.
        steps: How many they are, at least 1.
    """

    __slots__ = ("_base_fs", "_cost", "_linear", "_remainder_fs", "_slope_fs", "begins_ns", "first", "steps")

    def __init__(self, cost: StepCost, first: BatchComposition, *, begins_ns: int, remainder_fs: int) -> None:
        """``remainder_fs``: what the step before left below a nanosecond."""
        self.first = first
        self.begins_ns = begins_ns
        self.steps = 1
        self._cost = cost
        self._remainder_fs = remainder_fs
        self._base_fs = cost.duration_fs(first)
        self._linear = not cost.decode_context and self._base_fs > FS_PER_NS
        self._slope_fs = cost.context_token * first.decodes

    def limit(self, steps: int, span_ns: int) -> None:
        """Makes it as long as ``steps``, but no longer than it takes to reach ``span_ns``."""
        self.steps = max(1, min(steps, -(-span_ns * FS_PER_NS // self._base_fs)))

    def elapsed_fs(self, steps: int) -> int:
        """From the beginning to the end of that many steps, with the remainder from before."""
        if self._linear:
            return self._remainder_fs + steps * self._base_fs + self._slope_fs * (steps * (steps - 1) // 2)
        return self._remainder_fs + self._cost.decode_run_fs(self.first, steps)

    def ends_ns(self, steps: int) -> int:
        """Return the time at which that many steps are over."""
        return self.begins_ns + self.elapsed_fs(steps) // FS_PER_NS

    def under_way(self, now_ns: int) -> int:
        """Number (from 1) of the step that is under way at ``now_ns``; one that ends right then still is."""
        low, high = 1, self.steps
        while low < high:
            middle = (low + high) // 2
            if self.ends_ns(middle) >= now_ns:
                high = middle
            else:
                low = middle + 1
        return low

    def last(self, steps: int) -> tuple[BatchComposition, int]:
        """Composition and duration, ns, of the step with this number."""
        duration_ns = self.ends_ns(steps) - (self.ends_ns(steps - 1) if steps > 1 else self.begins_ns)
        return after(self.first, steps - 1), duration_ns


def decodes_left(sequences: list[ModelledSequence]) -> tuple[int, int]:
    """Looks ahead at sequences that decode together.

    Returns: steps until the first of these ends, that step included, 0 where one of them does not simply decode; and
    the sum of their ``total``, of use where it is not 0.
    """
    left, context = 1 << 60, 0
    for sequence in sequences:
        total = sequence.total
        context += total
        if sequence.computed + 1 != total or not sequence.announced or sequence.logprobs is not None:
            return 0, 0
        ahead = sequence.check_at - total
        if ahead < left:
            left = ahead
    return max(0, left), context
