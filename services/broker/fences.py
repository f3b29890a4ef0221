"""Checks that hold a sequence back although another instance may want it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.contracts.broker import MoveReason
from millrace.contracts.status import SequenceState, SequenceStatus

from services.broker.config import FenceConfig

_MS = 1_000_000

#: Cool-down and pay-back hold these back: the others have to leave, whatever it costs.
DEFERRABLE = (MoveReason.MEMORY, MoveReason.BOUNDARY, MoveReason.BALANCE)


@dataclass(frozen=True)
class MoveHistory:
    """Past moves of a sequence, as known to the instance that it came to.

    Attributes:
        balance_moves: In its life.
        moved_ns: When it came.
        tokens: Its length then.
        duration_ns: Of the move.
    """

    balance_moves: int = 0
    moved_ns: int = 0
    tokens: int = 0
    duration_ns: int = 0


#: Of a sequence that began here.
NEVER_MOVED = MoveHistory()


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
COOLDOWN_FACTOR, COOLDOWN_NS_MAX = 10, 4_000 * _MS

#: Balance moves in a sequence's life.
BALANCE_MOVES_MAX = 3


def cooled(status: SequenceStatus, history: MoveHistory, fences: FenceConfig, now_ns: int) -> bool:
    """Whether enough tokens and time have passed since its last move."""
    if history.moved_ns == 0:
        return True
    wanted_ns = min(COOLDOWN_FACTOR * history.duration_ns, COOLDOWN_NS_MAX)
    least_ns = max(fences.cooldown_ms * _MS, wanted_ns)
    return now_ns - history.moved_ns >= least_ns and length_of(status) - history.tokens >= fences.cooldown_tokens


def pays(rest_tokens: int | None, *, step_ns: int, move_ns: int, fences: FenceConfig) -> bool:
    """Whether it is expected to run long enough; an unknown rest counts as long enough.

    Args:
        step_ns: Time per token here; 0 where unknown.
    """
    if rest_tokens is None or step_ns <= 0:
        return True
    return rest_tokens * step_ns >= fences.payback_factor * move_ns


def outgrown(status: SequenceStatus, boundary: int, fences: FenceConfig) -> bool:
    """Whether it leaves its stage: past the boundary, and predicted to go well beyond it.

    Without a prediction it leaves when it has gone well beyond.
    """
    length, rest = length_of(status), rest_of(status)
    far = fences.hysteresis * boundary
    return length >= boundary and (length >= far or (rest is not None and length + rest >= far))


def balance_allowed(status: SequenceStatus, history: MoveHistory, fences: FenceConfig) -> bool:
    """Whether it may move for balance once more."""
    if history.balance_moves >= BALANCE_MOVES_MAX:
        return False
    return rest_of(status) is not None or status.output_tokens >= fences.decoded_min


def predicted_rest(status: SequenceStatus) -> int:
    """Tokens still to come: as predicted, else as many as its limit lets it."""
    rest = rest_of(status)
    return rest if rest is not None else max(0, status.max_tokens - status.output_tokens)
