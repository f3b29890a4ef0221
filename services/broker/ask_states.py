"""One sequence that is to leave, from the ask for bids to the end of its move, and the table of its states.

ASKING → MOVING → ENDED          a target that refuses is followed by the next best bid that still holds
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto

from millrace.actor.transitions import Transition, TransitionTable
from millrace.contracts.broker import AskForMove, BidRefusal, MoveBid, MoveReason
from millrace.contracts.migration import MigrationFinished, MigrationMode
from millrace.policies.trading import MovableSequence


class AskState(StrEnum):
    """State of an ask."""

    ASKING = "asking"  # bids are waited for
    MOVING = "moving"  # awarded: the migrator moves it
    ENDED = "ended"


class AskEvent(Enum):
    """Event in the life of an ask."""

    CHOSEN = auto()  # the policy picked a bid
    DECLINED = auto()  # nobody bids, or the sequence had better stay
    MOVED = auto()  # the migrator has moved it
    REFUSED = auto()  # its target did not take it, or the move failed
    GONE = auto()  # the sequence has ended or left
    VOID = auto()  # a new plan, or the bus was away


class AskGuard(Enum):
    """Condition on which a transition is taken."""

    ANOTHER_BID = auto()  # a bid of another instance holds that may be awarded


class AskReaction(Enum):
    """Something that is done."""

    AWARD = auto()
    LEAVE = auto()  # the sequence is elsewhere
    REST = auto()  # it is left alone for a while
    FORGET = auto()


_S, _E, _R = AskState, AskEvent, AskReaction

#: An event that the table does not list for a state changes nothing: it is late, or was told twice.
ASKS = TransitionTable[AskState, AskEvent, AskGuard, AskReaction](
    Transition(_S.ASKING, _E.CHOSEN, _S.MOVING, _R.AWARD),
    Transition(_S.ASKING, _E.DECLINED, _S.ENDED, _R.REST),
    Transition(_S.ASKING, _E.GONE, _S.ENDED, _R.FORGET),
    Transition(_S.ASKING, _E.VOID, _S.ENDED, _R.FORGET),
    Transition(_S.MOVING, _E.MOVED, _S.ENDED, _R.LEAVE),
    Transition(_S.MOVING, _E.REFUSED, _S.MOVING, _R.AWARD, guard=AskGuard.ANOTHER_BID),
    Transition(_S.MOVING, _E.REFUSED, _S.ENDED, _R.REST),
    Transition(_S.MOVING, _E.GONE, _S.ENDED, _R.FORGET),
)


@dataclass
class OutgoingAsk:
    """A sequence of an instance of ours that is to leave.

    Attributes:
        asked: Names of the candidates.
        gain_ns: By how much sooner the source's other sequences end without it, summed; 0 where not forecast.
        stay_ns: How long it would still run here; 0 where not forecast.
        bids: In order of arrival, and until when each holds.
        declined: Candidates that bid nothing or did not take it, and why.
        target: The awarded bidder; empty before.
        deadline_ns: When bids are compared, however many there are.
        started_ns: When the migrator was told; 0 before.
        gone_ns: Since when the snapshots do not show the sequence while it is being moved; 0 while they do.
        finished: Result of its last migration; None before the first.
        why: Why this bidder.
    """

    body: AskForMove
    asked: tuple[str, ...]
    deadline_ns: int
    mode: MigrationMode | None = None
    gain_ns: int = 0
    stay_ns: int = 0
    state: AskState = AskState.ASKING
    bids: dict[str, tuple[MoveBid, int]] = field(default_factory=dict)
    declined: dict[str, BidRefusal | str] = field(default_factory=dict)
    target: str = ""
    started_ns: int = 0
    gone_ns: int = 0
    finished: MigrationFinished | None = None
    why: str = ""

    @property
    def ask(self) -> str:
        return self.body.ask

    @property
    def sequence(self) -> str:
        return self.body.sequence

    @property
    def reason(self) -> MoveReason:
        return self.body.reason

    @property
    def tokens(self) -> int:
        """Its length when it was asked for."""
        return self.body.prompt_tokens + self.body.output_tokens

    @property
    def moving(self) -> bool:
        """Whether the migrator has it."""
        return self.state is AskState.MOVING

    def open_bids(self, now_ns: int) -> list[MoveBid]:
        """Bids that hold, in order of arrival."""
        return [bid for bid, until_ns in self.bids.values() if now_ns < until_ns]


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
