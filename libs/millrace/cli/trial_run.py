"""A changed instance on trial: the time that it takes for a token, beside the unchanged ones. Pure.

A token takes as many seconds as an instance has running sequences, divided by the tokens that it gives a second. A
batch of twice as many sequences takes at most twice as long, so an instance that has more running may be slower by as
much.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from statistics import median

from millrace.cli.cluster_rows import InstanceRow

#: Looks at an instance, each half a second after the one before.
LOOKS = 10

#: A changed instance that takes so many times as long is not kept.
SLOWER_MAX = 2.0

#: Looks that must have shown tokens of changed and of unchanged instances.
ENOUGH = 4

#: Tokens a second of an instance that gives none.
RATE_MIN = 0.1

#: After so many looks at a model that had nothing to do there is nothing to see.
IDLE_LOOKS = 3


class TrialRun:
    """Tokens of a model's instances, as far as they can be compared.

    Attributes:
        idle: Whether the model has nothing to do.
    """

    def __init__(self, model: str, changed: Container[str]) -> None:
        self._model, self._changed = model, changed
        self._new: list[tuple[int, float]] = []  # running sequences, seconds a token
        self._old: list[tuple[int, float]] = []
        self._unused = 0

    @property
    def idle(self) -> bool:
        return self._unused >= IDLE_LOOKS

    def look(self, rows: Iterable[InstanceRow]) -> None:
        """Takes what all instances do now."""
        busy = [row for row in rows if row.model == self._model and row.running]
        self._unused = 0 if busy else self._unused + 1
        for row in busy:
            if row.output_tokens_per_s is not None:
                seen = self._new if row.instance in self._changed else self._old
                seen.append((row.running, row.running / max(row.output_tokens_per_s, RATE_MIN)))

    def slower(self) -> float | None:
        """Times as long that a token takes; None where too little was seen."""
        if min(len(self._new), len(self._old)) < ENOUGH:
            return None
        return median(
            seconds / median(other_s * max(1.0, running / others) for others, other_s in self._old)
            for running, seconds in self._new
        )
