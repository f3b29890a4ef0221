"""Choice of sequences that leave an instance where all of them may: the first that find room side by side. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Set

import msgspec

from millrace.contracts.status import SequenceState, SequenceStatus


class LeavingQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """Sequences that may leave, and the room for them.

    Attributes:
        sequences: Of the instance; the first ones leave first.
        barred: Those that stay for now: they move already, rest after a refusal, or were given up.
        rooms: For each other instance, blocks of the largest sequence that it could take.
        growth_blocks: Blocks that a target keeps for a sequence beyond those that it has.
        count: How many may leave at most.
    """

    sequences: tuple[SequenceStatus, ...]
    barred: Set[str]
    rooms: tuple[int, ...]
    growth_blocks: int
    count: int


def leaving(question: LeavingQuestion) -> list[SequenceStatus]:
    """Sequences that decode, may move, and find room side by side, in the order given.

    A sequence that fits nowhere is passed over; later, smaller ones may go. Empty where there is no room or no
    candidate.
    """
    rooms = list(question.rooms)
    chosen: list[SequenceStatus] = []
    for status in question.sequences if question.count > 0 else ():
        largest = max(rooms, default=-1)
        if len(chosen) == question.count or largest < 0:
            break
        if status.blocks <= largest and _may_leave(status) and status.sequence not in question.barred:
            chosen.append(status)
            rooms[rooms.index(largest)] = largest - status.blocks - question.growth_blocks
    return chosen


def longest_rest_first(sequences: Iterable[SequenceStatus]) -> tuple[SequenceStatus, ...]:
    """Order in which an instance that shall be empty lets its sequences go: what is about to end may end there."""
    return tuple(sorted(sequences, key=lambda status: (-predicted_rest(status), status.sequence)))


def predicted_rest(status: SequenceStatus) -> int:
    """Tokens still to come: as predicted, else as many as its limit lets it."""
    expected = status.expected_output_tokens
    if expected is None or expected <= status.output_tokens:
        expected = status.max_tokens
    return max(0, min(expected, status.max_tokens) - status.output_tokens)


def _may_leave(status: SequenceStatus) -> bool:
    """Whether it decodes and its engine can let it go."""
    return status.state is SequenceState.RUNNING and status.output_tokens >= 1 and not status.immovable
