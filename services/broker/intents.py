"""Intents to move sequences off an instance, one per sequence, with the first reason that applies; and the fences that
hold a sequence back. Pure.

Moves for balance and memory come from the trading policy and the forecast. This module finds the sequences that have
to leave in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import overload

import msgspec
from millrace.contracts.broker import AskForMove, MoveReason
from millrace.contracts.migration import MigrationMode
from millrace.contracts.plan import InstanceRole
from millrace.contracts.status import SequenceState, SequenceStatus
from millrace.policies.trading import MovableSequence

from services.broker.config import FenceConfig
from services.broker.state import MS, NEVER_MOVED, MoveHistory

#: A sequence that has stayed past its boundary for so long leaves also where its rest was predicted to be short: the
#: prediction was wrong.
PAYBACK_NS_MAX = 4_000 * MS

#: Cool-down and pay-back hold these back: the others have to leave, whatever it costs.
DEFERRABLE = (MoveReason.MEMORY, MoveReason.BOUNDARY, MoveReason.BALANCE)


class Intent(msgspec.Struct, frozen=True):
    """One sequence shall leave.

    Attributes:
        target: Where an order wants it; empty for wherever there is room.
        mode: None for the migrator's own.
    """

    status: SequenceStatus
    reason: MoveReason
    target: str = ""
    mode: MigrationMode | None = None
    note: str = ""

    @property
    def recompute(self) -> bool:
        """Whether no KV travels."""
        return self.mode is MigrationMode.RECOMPUTE


class IntentView(msgspec.Struct, frozen=True, kw_only=True):
    """One instance and its sequences.

    Attributes:
        sequences: Of the last snapshot, in the engine's running order.
        boundary: Length at which its stage ends; None for the last stage.
        reasons: Those that are on.
        histories: By sequence; those that are not there have never moved.
        past_ns: Since when each sequence past the boundary is so.
        arriving: Sequences for which a bid holds, or has held lately. The snapshot may show one before its move has
            ended and its history is known.
        step_ns: Time per token; 0 where unknown.
        move_ns: What a move takes.
    """

    sequences: Sequence[SequenceStatus]
    role: InstanceRole
    draining: bool
    boundary: int | None
    reasons: Collection[MoveReason]
    histories: Mapping[str, MoveHistory]
    past_ns: Mapping[str, int]
    arriving: Collection[str]
    step_ns: int
    move_ns: int
    now_ns: int


def standing_intents(view: IntentView, fences: FenceConfig) -> list[Intent]:
    """Drains, hand-offs and boundaries, in order of precedence; within a reason the longest first, as recomputing those
    costs most, but of drains those last that are about to end.
    """
    all_leave = view.draining or view.role is InstanceRole.PREFILL
    least = 0 if all_leave else view.boundary
    if least is None:
        return []
    found = [
        Intent(status, reason)
        for status in view.sequences
        if status.prompt_tokens + status.output_tokens >= least
        and can_move(status)
        and (reason := _standing(status, view, fences)) is not None
    ]
    order = list(MoveReason)

    def key(intent: Intent) -> tuple[int, bool, int, str]:
        lasts, length = _urgency(intent, view)
        return (order.index(intent.reason), not lasts, -length, intent.status.sequence)

    return sorted(found, key=key)


def past_boundary(
    sequences: Sequence[SequenceStatus], boundary: int | None, known: Mapping[str, int], now_ns: int
) -> dict[str, int]:
    """Since when each running sequence has been past the boundary, Unix ns. ``known``: The last answer."""
    if boundary is None:
        return {}
    past = (status.sequence for status in sequences if length_of(status) >= boundary)
    return {sequence: known.get(sequence, now_ns) for sequence in past}


def _urgency(intent: Intent, view: IntentView) -> tuple[bool, int]:
    """Whether a drain need not move it, as it ends sooner than a move would; then its length."""
    ends = predicted_rest(intent.status) * view.step_ns < 2 * view.move_ns
    return (not (intent.reason is MoveReason.DRAIN and ends), length_of(intent.status))


def _standing(status: SequenceStatus, view: IntentView, fences: FenceConfig) -> MoveReason | None:
    if view.draining and MoveReason.DRAIN in view.reasons:
        return MoveReason.DRAIN
    if view.role is InstanceRole.PREFILL and MoveReason.HANDOFF in view.reasons:
        return MoveReason.HANDOFF
    if view.boundary is None or MoveReason.BOUNDARY not in view.reasons or length_of(status) < view.boundary:
        return None
    return MoveReason.BOUNDARY if unfenced(status, MoveReason.BOUNDARY, view, fences) else None


def unfenced(status: SequenceStatus, reason: MoveReason, view: IntentView, fences: FenceConfig) -> bool:
    """Whether cool-down, pay-back and the moves in its life let it go for that reason."""
    history = view.histories.get(status.sequence, NEVER_MOVED)
    if reason in DEFERRABLE and status.sequence in view.arriving:
        return False
    if reason in DEFERRABLE and not cooled(status, history, fences, view.now_ns):
        return False
    if reason in DEFERRABLE and not _pays(status, reason, view, fences):
        return False
    return reason is not MoveReason.BALANCE or balance_allowed(status, history, fences)


def _pays(status: SequenceStatus, reason: MoveReason, view: IntentView, fences: FenceConfig) -> bool:
    past_ns = view.now_ns - view.past_ns.get(status.sequence, view.now_ns)
    if reason is MoveReason.BOUNDARY and past_ns >= PAYBACK_NS_MAX:
        return True
    return pays(rest_of(status), step_ns=view.step_ns, move_ns=view.move_ns, fences=fences)


def movable(view: IntentView, reason: MoveReason, taken: Collection[str], fences: FenceConfig) -> list[MovableSequence]:
    """Sequences that a policy may offer for balance or memory: no fence holds them, no ask is open about them."""
    return [
        movable_of(status)
        for status in view.sequences
        if can_move(status) and status.sequence not in taken and unfenced(status, reason, view, fences)
    ]


def movable_of(status: SequenceStatus) -> MovableSequence:
    """A sequence as policies see it."""
    return MovableSequence(
        sequence=status.sequence,
        tokens=length_of(status),
        output_tokens=status.output_tokens,
        blocks=status.blocks,
        rest_p50=rest_of(status),
        rest_p90=longest_rest_of(status),
    )


class SequencesOnDemand(Sequence[MovableSequence]):
    """Sequences that are found when they are first looked at: most triggers look at the loads alone."""

    def __init__(self, find: Callable[[], Sequence[MovableSequence]]) -> None:
        self._find = find

    @cached_property
    def _found(self) -> Sequence[MovableSequence]:
        return self._find()

    @overload
    def __getitem__(self, index: int) -> MovableSequence: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[MovableSequence]: ...

    def __getitem__(self, index: int | slice) -> MovableSequence | Sequence[MovableSequence]:
        return self._found[index]

    def __len__(self) -> int:
        return len(self._found)


def asked_sequence(body: AskForMove) -> MovableSequence:
    """The sequence of an ask as policies see it."""
    return MovableSequence(
        sequence=body.sequence,
        tokens=body.prompt_tokens + body.output_tokens,
        output_tokens=body.output_tokens,
        blocks=body.blocks,
        rest_p50=body.rest_p50,
        rest_p90=body.rest_p90,
    )


# fences: what holds a sequence back although another instance may want it


def rest_of(status: SequenceStatus) -> int | None:
    """Predicted number of tokens still to come; None where nothing was predicted, or the sequence has outrun it."""
    if status.expected_output_tokens is None or status.expected_output_tokens <= status.output_tokens:
        return None
    return min(status.expected_output_tokens, status.max_tokens) - status.output_tokens


def longest_rest_of(status: SequenceStatus) -> int | None:
    """90th percentile of the tokens still to come, never below their median; None where that is unknown."""
    rest = rest_of(status)
    if rest is None or status.expected_p90 is None:
        return None
    return max(rest, min(status.expected_p90, status.max_tokens) - status.output_tokens)


def length_of(status: SequenceStatus) -> int:
    """Present length, tokens."""
    return status.prompt_tokens + status.output_tokens


def can_move(status: SequenceStatus) -> bool:
    """Whether its KV can travel: it decodes, and nothing of it is bound to the engine."""
    return status.state is SequenceState.RUNNING and status.output_tokens >= 1 and not status.immovable


#: A sequence that has moved stays for so many times as long as its last move took, but no longer than this: nobody is
#: kept past a boundary for five seconds beside idle room.
COOLDOWN_FACTOR, COOLDOWN_NS_MAX = 10, 4_000 * MS

#: Balance moves in a sequence's life.
BALANCE_MOVES_MAX = 3


def cooled(status: SequenceStatus, history: MoveHistory, fences: FenceConfig, now_ns: int) -> bool:
    """Whether enough tokens and time have passed since its last move."""
    if history.moved_ns == 0:
        return True
    wanted_ns = min(COOLDOWN_FACTOR * history.duration_ns, COOLDOWN_NS_MAX)
    least_ns = max(fences.cooldown_ms * MS, wanted_ns)
    return now_ns - history.moved_ns >= least_ns and length_of(status) - history.tokens >= fences.cooldown_tokens


def pays(rest_tokens: int | None, *, step_ns: int, move_ns: int, fences: FenceConfig) -> bool:
    """Whether it is expected to run long enough; an unknown rest counts as long enough.

    Args:
        step_ns: Time per token here; 0 where unknown.
    """
    if rest_tokens is None or step_ns <= 0:
        return True
    return rest_tokens * step_ns >= fences.payback_factor * move_ns


def balance_allowed(status: SequenceStatus, history: MoveHistory, fences: FenceConfig) -> bool:
    """Whether it may move for balance once more."""
    if history.balance_moves >= BALANCE_MOVES_MAX:
        return False
    return rest_of(status) is not None or status.output_tokens >= fences.decoded_min


def predicted_rest(status: SequenceStatus) -> int:
    """Tokens still to come: as predicted, else as many as its limit lets it."""
    rest = rest_of(status)
    return rest if rest is not None else max(0, status.max_tokens - status.output_tokens)
