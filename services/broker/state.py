"""State that a broker keeps of its instances and of each sequence that is to leave, and what its parts share.

ASKING → MOVING → ENDED          a target that refuses is followed by the next best bid that still holds
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from random import Random
from typing import Any

import msgspec
from millrace.actor.transitions import Transition, TransitionTable
from millrace.contracts.broker import AskForMove, BidRefusal, LoadReported, MoveBid, MoveReason
from millrace.contracts.migration import MigrateSequence, MigrationCost, MigrationFinished, MigrationMode
from millrace.contracts.plan import InstanceRole
from millrace.contracts.status import InstanceSummary, SequenceStatus, StatusSnapshot
from millrace.contracts.subjects import Subjects
from millrace.policies.trading import TradingPolicy

from services.broker.cluster_view import BrokerView
from services.broker.config import BrokerConfig, BrokerLimits, FenceConfig
from services.broker.forecasts import InstanceForecasts
from services.broker.metrics import BrokerMetrics

MS = 1_000_000

#: What a move is taken to cost before the first one: a pause of two steps or so, and a tenth of a second of copying.
FROZEN_NS_FIRST, DURATION_NS_FIRST = 20 * MS, 100 * MS

#: Share of a new move in those figures.
MOVE_SHARE = 0.2

#: Copying slows both engines: a move costs so large a share of its duration besides the pause.
COPY_SHARE = 0.1

#: Sequences asked for or moved at a time where all leave the instance: a move mostly waits for engines' steps, not for
#: the wire, so that more at once end sooner.
ALL_OUT_MAX = 8

#: Unless reads take so large a share of a move: then the wire is what they share.
WIRE_SHARE_MAX = 0.5

#: Sequences whose moves are remembered per instance.
HISTORIES_MAX = 4_096


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
        gain_ns: By how much sooner the source's other sequences end without it, summed; 0 where not forecast.
        stay_ns: How long it would still run here; 0 where not forecast.
        bids: In order of arrival, and until when each holds.
        declined: Candidates that bid nothing or did not take it, and why.
        target: The awarded bidder; empty before.
        deadline_ns: When bids are compared, however many there are.
        started_ns: When the migrator was told; 0 before.
        gone_ns: Since when the snapshots do not show the sequence while it is being moved; 0 while they do.
        finished: Result of its last migration; None before the first.
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
    def moving(self) -> bool:
        """Whether the migrator has it."""
        return self.state is AskState.MOVING

    def open_bids(self, now_ns: int) -> list[MoveBid]:
        """Bids that hold, in order of arrival."""
        return [bid for bid, until_ns in self.bids.values() if now_ns < until_ns]


@dataclass
class MoveCosts:
    """Recent cost of moves from an instance. Times in ns; ``wire_share``: of the duration, that blocks were read."""

    frozen_ns: float = FROZEN_NS_FIRST
    duration_ns: float = DURATION_NS_FIRST
    wire_share: float = 0.0

    def observe(self, cost: MigrationCost) -> None:
        share = cost.copied_ns / max(1, cost.duration_ns)
        self.frozen_ns += MOVE_SHARE * (cost.frozen_ns - self.frozen_ns)
        self.duration_ns += MOVE_SHARE * (cost.duration_ns - self.duration_ns)
        self.wire_share += MOVE_SHARE * (share - self.wire_share)

    @property
    def cost_ns(self) -> int:
        """Cost of one move to its sequence, ns."""
        return round(self.frozen_ns + COPY_SHARE * self.duration_ns)


@dataclass(frozen=True)
class MoveHistory:
    """Past moves of a sequence, as known to the instance that it came to.

    Attributes:
        balance_moves: In its life.
        moved_ns: When it came.
        tokens: Its length then.
    """

    balance_moves: int = 0
    moved_ns: int = 0
    tokens: int = 0
    duration_ns: int = 0


#: Of a sequence that began here.
NEVER_MOVED = MoveHistory()


@dataclass
class AskPause:
    """A sequence that no instance took is offered again after ``until_ns``; ``refusals`` in a row."""

    until_ns: int
    refusals: int


@dataclass
class SequenceNotes:
    """Facts that are remembered of an instance's sequences.

    Attributes:
        histories: Moves of those that came to it.
        past_ns: Since when each running one past the stage's boundary is so.
        rests: Those that no instance took.
        returned: Queued ones that its worker was asked to hand back, and when.
        left: Those that have moved away since the last snapshot.
    """

    histories: dict[str, MoveHistory] = field(default_factory=dict)
    past_ns: dict[str, int] = field(default_factory=dict)
    rests: dict[str, AskPause] = field(default_factory=dict)
    returned: dict[str, int] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)

    def remember(self, sequence: str, history: MoveHistory) -> None:
        """Keeps the moves of a sequence; beyond the bound the oldest are forgotten."""
        self.histories.pop(sequence, None)
        self.left.discard(sequence)
        self.histories[sequence] = history
        while len(self.histories) > HISTORIES_MAX:
            del self.histories[next(iter(self.histories))]


@dataclass
class LoadNotes:
    """An instance's load, as it is published.

    Attributes:
        reported: The last load, and ``at_ns`` when.
        output_total, output_at_ns, tokens_per_s: For its rate of decoding.
        memory_risk: Probability that it runs short within a few moves' time.
        why: What is done about its sequences, or why nothing moves.
    """

    reported: LoadReported | None = None
    at_ns: int = 0
    output_total: int = 0
    output_at_ns: int = 0
    tokens_per_s: float = 0.0
    memory_risk: float = 0.0
    why: str = ""


@dataclass
class BalanceNotes:
    """Attributes: policy: its state; ended_ns: end of the last balance move; rest: since asking was in vain."""

    policy: Any
    ended_ns: int = 0
    rest: AskPause | None = None


@dataclass(frozen=True)
class OpenBid:
    """A bid that holds until a time."""

    ask: AskForMove
    until_ns: int


@dataclass
class MoveOrder:
    """A move that somebody has asked for.

    Attributes:
        waiters: Reply subjects.
        again_ns: It is not asked for before this.
    """

    body: MigrateSequence
    at_ns: int
    until_ns: int
    waiters: list[str]
    again_ns: int = 0


@dataclass
class Evacuation:
    """Everything shall leave an instance.

    Attributes:
        failures: By sequence, those that say something of it.
        refusals: The last refusal of each sequence.
    """

    since_ns: int
    until_ns: int
    waiters: list[str]
    moved: int = 0
    failed: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)


@dataclass
class OwnInstance:
    """One instance that this broker acts for.

    Attributes:
        snapshot: The last one of its incarnation; None before. ``heard_ns``: when it came.
        forecasts: None while it is not registered, or cannot be forecast.
        asks: For its sequences, by id, from the first question to the end of the move.
        bids: That hold, by id of the ask; ``used`` has those that held lately, until their moves are over.
        orders: By sequence.
        evacuation: None while nobody asked for one.
    """

    instance: str
    balance: BalanceNotes
    snapshot: StatusSnapshot | None = None
    heard_ns: int = 0
    summary: InstanceSummary | None = None
    forecasts: InstanceForecasts | None = None
    asks: dict[str, OutgoingAsk] = field(default_factory=dict)
    bids: dict[str, OpenBid] = field(default_factory=dict)
    used: dict[str, OpenBid] = field(default_factory=dict)
    orders: dict[str, MoveOrder] = field(default_factory=dict)
    evacuation: Evacuation | None = None
    sequences: SequenceNotes = field(default_factory=SequenceNotes)
    costs: MoveCosts = field(default_factory=MoveCosts)
    load: LoadNotes = field(default_factory=LoadNotes)

    def running(self) -> list[SequenceStatus]:
        """Running sequences of the last snapshot, in the engine's order."""
        return self.snapshot.running if self.snapshot is not None else []

    def status(self, sequence: str) -> SequenceStatus | None:
        """A running sequence of the last snapshot."""
        return next((status for status in self.running() if status.sequence == sequence), None)

    def holds(self, sequence: str) -> bool:
        """Whether the last snapshot shows it, running or waiting."""
        waiting = self.snapshot.waiting if self.snapshot is not None else []
        return any(status.sequence == sequence for status in (*self.running(), *waiting))

    @property
    def draining(self) -> bool:
        """Whether everything shall leave it, and nothing comes."""
        return self.evacuation is not None or (self.summary is not None and self.summary.draining)

    @property
    def taken(self) -> set[str]:
        """Sequences that are asked for or moved."""
        return {ask.sequence for ask in self.asks.values()}

    @property
    def arriving(self) -> set[str]:
        """Sequences for which a bid holds, or has held lately."""
        return {bid.ask.sequence for bid in (*self.bids.values(), *self.used.values())}

    @property
    def promised(self) -> list[AskForMove]:
        """Asks whose bids hold and whose sequences no snapshot shows yet."""
        return [bid.ask for bid in self.bids.values() if not self.holds(bid.ask.sequence)]

    @property
    def promised_blocks(self) -> int:
        return sum(ask.blocks for ask in self.promised)

    @property
    def promised_tokens(self) -> int:
        return sum(ask.prompt_tokens + ask.output_tokens for ask in self.promised)


@dataclass
class BrokerContext:
    """Shared by the parts of one actor.

    Attributes:
        back_ns: When the bus last came back; snapshots of before do not count.
        plan_ns: When the plan of a model last changed, by model.
    """

    config: BrokerConfig
    subjects: Subjects
    rng: Random
    view: BrokerView
    metrics: BrokerMetrics
    policy: TradingPolicy
    parameters: msgspec.Struct
    connected: bool = True
    back_ns: int = 0
    plan_ns: dict[str, int] = field(default_factory=dict)

    @property
    def limits(self) -> BrokerLimits:
        return self.config.limits

    @property
    def fences(self) -> FenceConfig:
        return self.config.fences

    def all_leave(self, own: OwnInstance) -> bool:
        """Whether whatever runs at the instance shall leave it, the sooner the better: it drains, or only prefills."""
        return own.draining or self.view.role(own.instance) is InstanceRole.PREFILL

    def out_max(self, own: OwnInstance) -> int:
        """Sequences of an instance that may be asked for or moved at a time."""
        wide = self.all_leave(own) and own.costs.wire_share < WIRE_SHARE_MAX
        return max(self.limits.out_max, ALL_OUT_MAX) if wide else self.limits.out_max

    def fresh(self, own: OwnInstance, now_ns: int) -> bool:
        """Whether the state of an instance is known now: heard lately, and since the bus came back."""
        if not self.connected or own.snapshot is None or own.heard_ns <= self.back_ns:
            return False
        return now_ns - own.heard_ns < self.limits.load_age_ms * MS
