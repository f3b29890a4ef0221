"""A broker's deals, away from its instances and to them, and the table of their states.

    away     ASKING → OFFERING → QUEUED ⇄ GRANTED → MOVING → ENDED
    to       QUEUED ⇄ GRANTED → MOVING → ENDED          a starving one: QUEUED → KEPT → MOVING

An event that the table does not list for a state changes nothing: it is late, lost a race, or is forged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from millrace.contracts.broker import AskForMove, DealRefusal, MoveBid, MoveReason, OfferDeal

#: Numbers beyond this are no lengths; nor are times beyond that.
LENGTH_MAX, TIME_MAX = 1 << 31, 1 << 62


class DealState(StrEnum):
    """State of a deal, on either side."""

    ASKING = "asking"  # bids are waited for
    OFFERING = "offering"  # a bid was accepted, its bidder has not answered yet
    QUEUED = "queued"  # agreed, waits for a slot of the target
    GRANTED = "granted"  # has a slot of the target, waits for one of the source
    KEPT = "kept"  # a slot is kept for it: it was postponed too often
    MOVING = "moving"  # the migrator moves it
    ENDED = "ended"


class DealEvent(StrEnum):
    """Event in the life of a deal."""

    CHOSEN = "chosen"  # the policy picked a bid
    QUEUE = "queue"  # the target queues it
    GRANT = "grant"  # a slot of the target is its
    KEEP = "keep"  # the same, with the slot kept
    START = "start"  # the migrator was told
    POSTPONE = "postpone"  # the source has no slot
    LAPSE = "lapse"  # the grant's time is over
    FINISH = "finish"  # the migration is over
    CLOSE = "close"  # refused, withdrawn, expired, or nobody wants it


_S, _E = DealState, DealEvent

#: Of a deal at its source.
OUTGOING: Mapping[tuple[DealState, DealEvent], DealState] = MappingProxyType(
    {
        (_S.ASKING, _E.CHOSEN): _S.OFFERING,
        (_S.ASKING, _E.CLOSE): _S.ENDED,
        (_S.OFFERING, _E.QUEUE): _S.QUEUED,
        (_S.OFFERING, _E.GRANT): _S.GRANTED,
        (_S.OFFERING, _E.CLOSE): _S.ENDED,
        (_S.QUEUED, _E.GRANT): _S.GRANTED,
        (_S.QUEUED, _E.CLOSE): _S.ENDED,
        (_S.GRANTED, _E.GRANT): _S.GRANTED,  # repeated, or kept from now on
        (_S.GRANTED, _E.POSTPONE): _S.QUEUED,
        (_S.GRANTED, _E.LAPSE): _S.QUEUED,
        (_S.GRANTED, _E.START): _S.MOVING,
        (_S.GRANTED, _E.CLOSE): _S.ENDED,
        (_S.MOVING, _E.FINISH): _S.ENDED,
    }
)

#: Of a deal at its target.
INCOMING: Mapping[tuple[DealState, DealEvent], DealState] = MappingProxyType(
    {
        (_S.QUEUED, _E.GRANT): _S.GRANTED,
        (_S.QUEUED, _E.KEEP): _S.KEPT,
        (_S.QUEUED, _E.CLOSE): _S.ENDED,
        (_S.QUEUED, _E.FINISH): _S.ENDED,
        (_S.GRANTED, _E.START): _S.MOVING,
        (_S.GRANTED, _E.POSTPONE): _S.QUEUED,
        (_S.GRANTED, _E.LAPSE): _S.QUEUED,
        (_S.GRANTED, _E.CLOSE): _S.ENDED,
        (_S.GRANTED, _E.FINISH): _S.ENDED,
        (_S.KEPT, _E.START): _S.MOVING,
        (_S.KEPT, _E.POSTPONE): _S.KEPT,
        (_S.KEPT, _E.CLOSE): _S.ENDED,
        (_S.KEPT, _E.FINISH): _S.ENDED,
        (_S.MOVING, _E.FINISH): _S.ENDED,
        (_S.MOVING, _E.CLOSE): _S.ENDED,
    }
)

#: States of a deal at its target that take a slot.
SLOTTED = (DealState.GRANTED, DealState.KEPT, DealState.MOVING)


class _Deal:
    """The one place that assigns a deal's state."""

    _table: Mapping[tuple[DealState, DealEvent], DealState]
    state: DealState

    def may(self, event: DealEvent) -> bool:
        """Whether the table lists the event in the present state."""
        return (self.state, event) in self._table

    def advance(self, event: DealEvent) -> bool:
        """Goes where the table says. Returns False, and changes nothing, where it says nothing."""
        after = self._table.get((self.state, event))
        if after is None:
            return False
        self.state = after
        return True


@dataclass
class OutgoingDeal(_Deal):
    """A sequence of an instance of ours that is to leave.

    Attributes:
        ask: As it was asked.
        asked: Names of the candidates.
        bids: In order of arrival.
        declined: Candidates that bid nothing, and why.
        target: The chosen bidder; empty before.
        deadline_ns: When the present state ends by itself.
        started_ns: When the migrator was told; 0 before.
        gone_ns: Since when the snapshots do not show the sequence while it is being moved; 0 while they do.
        kept: The target keeps a slot: it goes first.
        why: Why this bidder.
    """

    ask: AskForMove
    asked: tuple[str, ...]
    deadline_ns: int
    state: DealState = DealState.ASKING
    bids: list[MoveBid] = field(default_factory=list)
    declined: dict[str, DealRefusal] = field(default_factory=dict)
    target: str = ""
    started_ns: int = 0
    hold_until_ns: int = 0
    gone_ns: int = 0
    kept: bool = False
    why: str = ""

    _table = OUTGOING

    @property
    def deal(self) -> str:
        """Its name."""
        return self.ask.deal

    @property
    def sequence(self) -> str:
        """Sequence that moves."""
        return self.ask.sequence

    @property
    def reason(self) -> MoveReason:
        """Reason of the move."""
        return self.ask.reason

    @property
    def tokens(self) -> int:
        """Its length when it was asked for."""
        return self.ask.prompt_tokens + self.ask.output_tokens


@dataclass
class IncomingDeal(_Deal):
    """A sequence that an instance of ours has agreed to take.

    Attributes:
        until_ns: When the present state ends by itself.
        hold_until_ns: When it ends if it was not started.
        not_before_ns: It is not granted a slot before this.
        attempts: Grants that came to nothing.
        order: Of arrival.
        source_incarnation: Of the source's broker when it made the offer: another one knows nothing of it.
        confirm_ns: When the source is asked whether the transfer still goes on.
        unconfirmed: Times in a row that it did not answer.
    """

    offer: OfferDeal
    order: int
    source_incarnation: int
    until_ns: int
    hold_until_ns: int
    state: DealState = DealState.QUEUED
    not_before_ns: int = 0
    attempts: int = 0
    confirm_ns: int = 0
    unconfirmed: int = 0

    _table = INCOMING

    @property
    def deal(self) -> str:
        """Its name."""
        return self.offer.deal

    @property
    def slotted(self) -> bool:
        """Whether it takes a slot."""
        return self.state in SLOTTED

    @property
    def rank(self) -> tuple[int, int, int]:
        """Place in the queue, the smallest first: reason, then the more the source wants to move, then arrival.

        Source: CascadeInfer, section 4.4; differs in that the reason comes first.
        """
        return (_ORDER[self.offer.reason], -self.offer.queued_tokens, self.order)


_ORDER = {reason: index for index, reason in enumerate(MoveReason)}


@dataclass(frozen=True)
class OpenBid:
    """A bid that holds. ``tokens`` and ``blocks``: promised with it."""

    ask: AskForMove
    until_ns: int
    tokens: int
    blocks: int
