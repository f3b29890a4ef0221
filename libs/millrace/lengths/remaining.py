"""Remaining lengths as an instance tells them: the engine's own estimate where it makes one, else survival.

An engine that estimates writes ``(expected, p90, at)`` into a sequence's status (``SequenceStatus``), and judges by
itself how far it can be believed; one that is older than STALE_TOKENS, or that no sequence can have, counts as none.
Without one the length that came with the request stands until the sequence outruns it, and from there on the median of
survival counts; the p90 is survival's throughout. On the recordings of the shipped models that rule has a lower error
than either alone (docs/decisions/0027).
"""

from __future__ import annotations

from collections.abc import Iterable

from millrace.contracts.status import SequenceStatus
from millrace.lengths.survival import Survival

#: Tokens after which an engine's estimate says nothing any more.
STALE_TOKENS = 4_000


class RemainingLengths:
    """Remaining-length estimates of one instance's sequences.

    Attributes:
        survival: Learnt from outcomes here.
        ignored: Estimates of the engine that no sequence can have.
    """

    def __init__(self, survival: Survival | None = None) -> None:
        self.survival = survival or Survival()
        self.ignored = 0

    def reported(self, entries: Iterable[SequenceStatus]) -> list[SequenceStatus]:
        """The same sequences with what is expected of them now."""
        plain = self._by_survival
        return [
            plain(entry, entry.expected_output_tokens)
            if (at := entry.expected_at) is None
            else self._of_engine(entry, at)
            for entry in entries
        ]

    def _of_engine(self, entry: SequenceStatus, at: int) -> SequenceStatus:
        expected, p90 = entry.expected_output_tokens, entry.expected_p90
        if expected is None or p90 is None or not 0 <= at < expected <= p90:
            self.ignored += 1
        elif entry.output_tokens - at <= STALE_TOKENS:
            return entry
        return self._by_survival(entry, None)

    def _by_survival(self, entry: SequenceStatus, submitted: int | None) -> SequenceStatus:
        """The submitted length until it is reached, then the median of those that came so far.

        A rest before the first token says no more than the submitted length does, so a waiting sequence keeps that.
        """
        generated = entry.output_tokens
        rest = self.survival.rest(generated)
        if rest is None:
            return entry if entry.expected_at is None else _told(entry, submitted, None)
        top = entry.max_tokens if entry.max_tokens > generated else generated + 1
        median, p90 = rest
        expected = submitted if submitted is not None and submitted > generated else min(generated + median, top)
        return _told(entry, expected, max(expected, min(generated + p90, top)))


def _told(entry: SequenceStatus, expected: int | None, p90: int | None) -> SequenceStatus:
    generated = entry.output_tokens
    return SequenceStatus(
        entry.sequence,
        entry.state,
        entry.prompt_tokens,
        entry.computed_tokens,
        generated,
        entry.max_tokens,
        entry.blocks,
        entry.arrival_ns,
        expected,
        entry.immovable,
        p90,
        generated if p90 is not None else None,
    )
