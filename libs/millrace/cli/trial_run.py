"""A changed instance on trial: the time that it takes for a token, beside the unchanged ones. Pure.

The time for a token is the running time of all sequences of an instance, summed, divided by the tokens that it gave. A
batch of twice as many sequences takes at most twice as long, so an instance that has more running may be slower by as
much.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

import msgspec

from millrace.cli.cluster_rows import InstanceRow

#: A trial's length, and the time between two looks: instances say what they do at least as often.
TRIAL_S, LOOK_S = 5.0, 0.25

#: A changed instance that takes so many times as long is not kept. Real engines that were as good as before took 1.1 to
#: 1.9 times as long, on two cores that their clients used as well.
SLOWER_MAX = 3.0

#: An engine's first steps are slow: this much time of running ones does not count.
WARM_S = 1.0

#: Both sides must have had sequences for so long together, seconds.
ENOUGH_S = 1.0

#: A model that has had nothing to do for so long shows nothing.
IDLE_S = 1.5


class _Work(msgspec.Struct):
    """Sums over the looks at instances, over their time in seconds.

    Attributes:
        busy_s: Time with a running sequence.
        squares: Squares of their number; by ``sequences_s`` it is the batch that a sequence was in.
    """

    busy_s: float = 0.0
    sequences_s: float = 0.0
    squares: float = 0.0
    tokens: int = 0


class TrialRun:
    """Tokens of a model's instances, as far as they can be compared.

    Attributes:
        idle: Whether the model has nothing to do.
    """

    def __init__(self, model: str, changed: Container[str]) -> None:
        self._model, self._changed = model, changed
        self._new, self._old = _Work(), _Work()
        self._seen: dict[str, tuple[float, InstanceRow]] = {}
        self._warm_s = self._idle_s = 0.0

    @property
    def idle(self) -> bool:
        return self._idle_s >= IDLE_S

    def look(self, rows: Iterable[InstanceRow], now_s: float) -> None:
        """Takes what all instances do now. ``now_s``: rises."""
        passed_s, busy = 0.0, False
        for row in rows:
            if row.model != self._model:
                continue
            before_s, before = self._seen.get(row.instance, (now_s, row))
            self._seen[row.instance] = now_s, row
            passed_s, busy = now_s - before_s, busy or bool(row.running)
            tokens = row.output_tokens - before.output_tokens
            if not before.running or tokens < 0:  # a new process counts from 0
                continue
            new = row.instance in self._changed
            if new and self._warm_s < WARM_S:
                self._warm_s += passed_s
                continue
            work = self._new if new else self._old
            work.busy_s += passed_s
            work.sequences_s += passed_s * before.running
            work.squares += passed_s * before.running**2
            work.tokens += tokens
        self._idle_s = 0.0 if busy else self._idle_s + passed_s

    def slower(self) -> float | None:
        """Times as long that a token takes; None where too little was seen."""
        new, old = self._new, self._old
        if min(new.busy_s, old.busy_s) < ENOUGH_S or not old.tokens:
            return None
        batch = (new.squares / new.sequences_s) / (old.squares / old.sequences_s)
        return new.sequences_s / max(1, new.tokens) / (old.sequences_s / old.tokens) / max(1.0, batch)
