"""State that a broker keeps of each of its instances, and state that its parts share."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec
from millrace.contracts.broker import LoadReported
from millrace.contracts.status import InstanceSummary, SequenceStatus, StatusSnapshot
from millrace.contracts.subjects import Subjects
from millrace.policies.trading import TradingPolicy

from services.broker.cluster_view import BrokerView
from services.broker.config import BrokerConfig, BrokerLimits, FenceConfig
from services.broker.deals import DealState, IncomingDeal, OpenBid, OutgoingDeal
from services.broker.fences import MoveHistory
from services.broker.forecasts import InstanceForecasts
from services.broker.metrics import BrokerMetrics

MS = 1_000_000

#: What a move is taken to cost before the first one: a pause of two steps or so, and a tenth of a second of copying.
FROZEN_NS_FIRST, DURATION_NS_FIRST = 20 * MS, 100 * MS

#: Share of a new move in those figures.
MOVE_SHARE = 0.2

#: Copying slows both engines: a move costs so large a share of its duration besides the pause.
COPY_SHARE = 0.1

#: Sequences whose moves are remembered per instance.
HISTORIES_MAX = 4_096


@dataclass
class MoveCosts:
    """Recent cost of moves from an instance. Times in ns."""

    frozen_ns: float = FROZEN_NS_FIRST
    duration_ns: float = DURATION_NS_FIRST

    def observe(self, *, frozen_ns: int, duration_ns: int) -> None:
        """A move is over."""
        self.frozen_ns += MOVE_SHARE * (frozen_ns - self.frozen_ns)
        self.duration_ns += MOVE_SHARE * (duration_ns - self.duration_ns)

    @property
    def cost_ns(self) -> int:
        """Cost of one move to its sequence, ns."""
        return round(self.frozen_ns + COPY_SHARE * self.duration_ns)


@dataclass
class OfferPause:
    """A sequence that nobody took is offered again after ``until_ns``; ``refusals`` in a row."""

    until_ns: int
    refusals: int


@dataclass
class OwnInstance:
    """One instance that this broker acts for.

    Attributes:
        snapshot: The last one of its incarnation; None before.
        heard_ns: When it came.
        summary: The last one.
        forecasts: None while it is not registered, or cannot be forecast.
        histories: Moves of the sequences that came to it.
        past_ns: Since when each running sequence past the stage's boundary is so.
        outgoing, incoming: Open deals by name.
        bids: Those that hold, by deal.
        ended: Deals that are over, with the last answer given, to answer what is repeated.
        rests: Sequences that nobody took.
        returned: Queued sequences that its worker was asked to hand back, and when.
        left: Sequences that have moved away since the last snapshot.
        trading: State of the policy.
        told: The last load that was told.
        balanced_ns: End of its last balance move.
        short_since_ns: Since when memory is forecast to run short; None while it is not.
        memory_risk: Probability that it runs short within a few moves' time.
        output_total, output_at_ns, tokens_per_s: For its rate of decoding.
        orders: Of arriving deals, counted.
        evacuated_until_ns: Everything shall leave it until then, or until its migrator says that this is over; 0 where
            nobody asked.
    """

    instance: str
    trading: Any
    snapshot: StatusSnapshot | None = None
    heard_ns: int = 0
    summary: InstanceSummary | None = None
    forecasts: InstanceForecasts | None = None
    histories: dict[str, MoveHistory] = field(default_factory=dict)
    past_ns: dict[str, int] = field(default_factory=dict)
    outgoing: dict[str, OutgoingDeal] = field(default_factory=dict)
    incoming: dict[str, IncomingDeal] = field(default_factory=dict)
    bids: dict[str, OpenBid] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    rests: dict[str, OfferPause] = field(default_factory=dict)
    returned: dict[str, int] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    costs: MoveCosts = field(default_factory=MoveCosts)
    told: LoadReported | None = None
    told_ns: int = 0
    balanced_ns: int = 0
    short_since_ns: int | None = None
    memory_risk: float = 0.0
    output_total: int = 0
    output_at_ns: int = 0
    tokens_per_s: float = 0.0
    orders: int = 0
    evacuated_until_ns: int = 0

    def sequences(self) -> list[SequenceStatus]:
        """Running ones of the last snapshot, in the engine's order."""
        return self.snapshot.running if self.snapshot is not None else []

    def status(self, sequence: str) -> SequenceStatus | None:
        """A running sequence of the last snapshot."""
        return next((status for status in self.sequences() if status.sequence == sequence), None)

    def holds(self, sequence: str) -> bool:
        """Whether the last snapshot shows it, running or waiting."""
        waiting = self.snapshot.waiting if self.snapshot is not None else []
        return any(status.sequence == sequence for status in (*self.sequences(), *waiting))

    @property
    def draining(self) -> bool:
        """Whether everything shall leave it, and nothing comes."""
        return self.evacuated_until_ns > 0 or (self.summary is not None and self.summary.draining)

    @property
    def moving_out(self) -> int:
        """Transfers away that its migrator was told of."""
        return sum(deal.state is DealState.MOVING for deal in self.outgoing.values())

    @property
    def slots_taken(self) -> int:
        """Slots that arriving deals take."""
        return sum(deal.slotted for deal in self.incoming.values())

    @property
    def taken(self) -> set[str]:
        """Sequences about which a deal is open."""
        return {deal.sequence for deal in self.outgoing.values()}

    @property
    def arriving(self) -> set[str]:
        """Sequences that are to come, or have come and whose deal has not ended."""
        return {deal.offer.sequence for deal in self.incoming.values()}

    @property
    def promised_blocks(self) -> int:
        """Blocks of deals that no snapshot shows yet."""
        return sum(deal.offer.blocks for deal in self.incoming.values() if not self.holds(deal.offer.sequence))

    @property
    def promised_tokens(self) -> int:
        """The same in tokens."""
        return sum(deal.offer.tokens for deal in self.incoming.values() if not self.holds(deal.offer.sequence))

    @property
    def queued_out_tokens(self) -> int:
        """Lengths of all sequences that it wants to move."""
        return sum(deal.tokens for deal in self.outgoing.values())


@dataclass
class BrokerContext:
    """Shared by the parts of one actor.

    Attributes:
        connected: Whether the bus is there.
        back_ns: When it last came back; snapshots of before do not count.
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
        """Bounds and deadlines."""
        return self.config.limits

    @property
    def fences(self) -> FenceConfig:
        """Limits that hold sequences back."""
        return self.config.fences

    def fresh(self, own: OwnInstance, now_ns: int) -> bool:
        """Whether the state of an instance is known now: heard lately, and since the bus came back."""
        if not self.connected or own.snapshot is None or own.heard_ns <= self.back_ns:
            return False
        return now_ns - own.heard_ns < self.limits.load_age_ms * MS

    def remember(self, own: OwnInstance, sequence: str, history: MoveHistory) -> None:
        """Keeps the moves of a sequence; beyond the bound the oldest are forgotten."""
        own.histories.pop(sequence, None)
        own.left.discard(sequence)
        own.histories[sequence] = history
        while len(own.histories) > HISTORIES_MAX:
            del own.histories[next(iter(own.histories))]
