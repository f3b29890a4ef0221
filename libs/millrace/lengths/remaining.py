"""Remaining lengths as an instance tells them: the engine's own estimate where it may be believed, else survival.

An engine that reads hidden states writes ``(expected, p90, at)`` into a sequence's status (``SequenceStatus``). It is
believed unless it is older than STALE_TOKENS, or its p90s have not covered what they should of the sequences that ended
here; its p90 is moved until it covers 90 % of the tokens here (`coverage.py`). Where it is not believed, or says
nothing, the length that came with the request stands until the sequence outruns it, and from there on the median of
survival counts; the p90 is survival's throughout. On the recordings of the shipped models that rule has a lower error
than either alone (docs/decisions/0027).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from millrace.contracts.status import SequenceStatus
from millrace.lengths.coverage import Coverage, P90Correction
from millrace.lengths.survival import Survival

#: Tokens after which an engine's estimate says nothing any more.
STALE_TOKENS = 4_000
#: Estimates of one sequence that are judged: its first, and one each time its length has doubled.
WATCHED_MAX = 20


class _Watched(NamedTuple):
    """An estimate that will be judged, as the engine made it and as it was reported."""

    at: int
    p90: int
    reported: int


class RemainingLengths:
    """Remaining-length estimates of one instance's sequences. Learns from every sequence that leaves the instance.

    Attributes:
        survival: Learnt from outcomes here.
        coverage: Of the engine's own estimates.
        correction: Of their p90.
        ignored: Estimates of the engine that no sequence can have.
    """

    def __init__(self, survival: Survival | None = None) -> None:
        self.survival = survival or Survival()
        self.coverage = Coverage()
        self.correction = P90Correction()
        self.ignored = 0
        self._watched: dict[str, list[_Watched]] = {}

    def reported(self, entries: Iterable[SequenceStatus]) -> list[SequenceStatus]:
        """The same sequences with what is expected of them now."""
        believed, plain = not self.coverage.refusal, self._by_survival
        return [
            plain(entry, entry.expected_output_tokens)
            if (at := entry.expected_at) is None
            else self._told(entry, at, believed=believed)
            for entry in entries
        ]

    def _told(self, entry: SequenceStatus, at: int, *, believed: bool) -> SequenceStatus:
        if not self._possible(entry):
            self.ignored += 1
            return self._by_survival(entry, None)
        p90 = self._corrected(entry)
        self._watch(entry, p90)
        if believed and entry.output_tokens - at <= STALE_TOKENS:
            return entry if p90 == entry.expected_p90 else msgspec.structs.replace(entry, expected_p90=p90)
        return self._by_survival(entry, None)

    def _possible(self, entry: SequenceStatus) -> bool:
        expected, p90, at = entry.expected_output_tokens, entry.expected_p90, entry.expected_at
        return expected is not None and p90 is not None and at is not None and 0 <= at < expected <= p90

    def _corrected(self, entry: SequenceStatus) -> int:
        """The p90 of the whole length, moved, within what ``max_tokens`` allows; at least the expected length."""
        expected, p90, at = entry.expected_output_tokens, entry.expected_p90, entry.expected_at
        assert expected is not None
        assert p90 is not None
        assert at is not None
        return max(expected, min(max(p90, entry.max_tokens), at + self.correction.moved(expected - at, p90 - at)))

    def _watch(self, entry: SequenceStatus, reported: int) -> None:
        assert entry.expected_at is not None
        assert entry.expected_p90 is not None
        watched = self._watched.setdefault(entry.sequence, [])
        due = not watched or entry.expected_at >= max(1, 2 * watched[-1].at)
        if due and len(watched) < WATCHED_MAX:
            watched.append(_Watched(entry.expected_at, entry.expected_p90, reported))

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

    def left(self, sequence: str, length: int, *, entered: int, ended: bool, cut: bool = False) -> None:
        """A sequence left this instance.

        Args:
            length: Its output tokens by then.
            entered: Those that it came with.
            ended: It ended by itself.
            cut: ``max_tokens`` ended it. With neither it was cancelled or goes on elsewhere.
        """
        self.survival.learn(length, entered=entered, ended=ended)
        watched = self._watched.pop(sequence, [])
        if not (ended or cut):
            return
        believed = not self.coverage.refusal
        for index, each in enumerate(watched):
            until = watched[index + 1].at if index + 1 < len(watched) else length
            self.coverage.judge(until - each.at, within=length <= each.p90)
            if believed:
                self.correction.judge(until - each.at, within=length <= each.reported)

    def keep(self, sequences: Iterable[str]) -> None:
        """Forgets estimates of all other sequences: a bound where an end was missed."""
        if self._watched:
            known = set(sequences)
            self._watched = {name: watched for name, watched in self._watched.items() if name in known}

    def plain(self) -> dict[str, Any]:
        """For people; ``coverage`` is the share of tokens within the engine's p90, None while too few were judged."""
        return {
            "outcomes": self.survival.outcomes,
            "coverage": self.coverage.share,
            "correction": self.correction.factor,
            "refusal": self.coverage.refusal,
            "ignored": self.ignored,
        }


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
