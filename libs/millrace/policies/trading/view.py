"""Input and output of a trading policy, and comparisons of loads that several policies make.

Views are frozen; the broker makes one per question.

A move is traded in three steps. ``trigger`` and ``pick`` run at the source. ``burden`` runs at each bidder, which knows
its own state best. Lengths are in tokens, times in nanoseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from millrace.contracts.broker import LoadCurve, LoadReported, MoveReason
from millrace.contracts.observers import CandidateScore


class LoadView(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The load of one instance.

    Attributes:
        tokens: KV tokens of running sequences.
        waiting_tokens: Tokens that queued sequences will need at least.
        queued_tokens: Lengths of sequences that are to move there.
        tokens_per_s: Tokens that it decodes; 0 where unknown.
        curve: Forecast over a horizon; None where there is none.
    """

    name: str
    tokens: int
    waiting_tokens: int = 0
    queued_tokens: int = 0
    running: int = 0
    waiting: int = 0
    blocks_free: int = 0
    blocks_total: int = 0
    tokens_per_s: float = 0.0
    curve: LoadCurve | None = None

    @property
    def demand(self) -> int:
        """Tokens that it holds or will have to hold for what it has now."""
        return self.tokens + self.waiting_tokens + self.queued_tokens


class MovableSequence(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A running sequence of the source that may move now.

    Attributes:
        tokens: Present length, prompt included.
        rest_p50, rest_p90: Predicted number of tokens still to come; None if unknown.
    """

    sequence: str
    tokens: int
    output_tokens: int
    blocks: int
    rest_p50: int | None = None
    rest_p90: int | None = None


class TriggerView(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Does this instance carry too much for its set?

    Attributes:
        peers: The other instances of its set (same stage, a role that decodes), in order of name.
        sequences: Those that no fence holds back, in the engine's running order. They may be found only when they are
            first looked at: a policy looks at the loads before.
    """

    own: LoadView
    peers: tuple[LoadView, ...]
    sequences: Sequence[MovableSequence]


class Trigger(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Sequences that the source should try to move for balance, the best first; none where it is balanced.

    Attributes:
        reason: One sentence with units; also where nothing is offered.
    """

    offers: tuple[str, ...] = ()
    reason: str = ""


class JoinView(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The bidder's future with the sequence, by simulation.

    Attributes:
        others_delay_ns: By how much later its other sequences end, summed.
        rest_ns: Until the sequence ends there.
        blocks_peak: Most blocks in use until then.
        preemptions: More than without it.
    """

    others_delay_ns: int
    rest_ns: int
    blocks_peak: int = 0
    preemptions: int = 0


class BurdenView(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Input of ``burden``: the cost of a sequence at a bidder.

    Attributes:
        own: The bidder, with what it has agreed to take.
        asker: The source, as far as it was heard; None where it was not.
        peers: The other instances of the bidder's set.
        forecast: None where the policy needs none, or the bidder cannot forecast itself.
    """

    own: LoadView
    sequence: MovableSequence
    reason: MoveReason
    asker: LoadView | None = None
    peers: tuple[LoadView, ...] = ()
    forecast: JoinView | None = None


class BidView(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One bid, as MoveBid."""

    bidder: str
    burden_ns: int
    load_tokens: int
    blocks_idle: int
    rest_ns: int = 0
    preemptions: int = 0


class PickView(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Input of ``pick``: the bids for a sequence, of which one or none is chosen.

    Attributes:
        bids: In order of arrival; each has room.
        gain_ns, stay_ns: As in AskForMove.
        cost_ns: What a move costs the sequence: the pause, and its share of the copying.
    """

    sequence: MovableSequence
    reason: MoveReason
    own: LoadView
    bids: tuple[BidView, ...]
    gain_ns: int = 0
    stay_ns: int = 0
    cost_ns: int = 0


class PickDecision(msgspec.Struct, frozen=True, gc=False):
    """An answer.

    Attributes:
        chosen: Bidder; None where the sequence had better stay.
        reason: One sentence with units.
        scores: Of every bid; lower is better.
    """

    chosen: str | None
    reason: str
    scores: list[CandidateScore]


def mean_over_horizon(load: LoadView) -> float:
    """Tokens that it is forecast to carry, averaged over the curve; its present demand where there is none."""
    curve = load.curve
    if curve is None or not curve.tokens:
        return float(load.demand)
    return sum(curve.tokens) / len(curve.tokens) + load.queued_tokens


def maximum_falls(source_tokens: int, target_tokens: int, moved_tokens: int) -> bool:
    """Whether the larger of the two loads is smaller after the move: moves that all obey this come to an end."""
    return target_tokens + moved_tokens < source_tokens


def fitting(sequences: Sequence[MovableSequence], excess_tokens: float) -> list[MovableSequence]:
    """Sequences no longer than the excess: whoever moves more makes the target the heavier one."""
    return [each for each in sequences if each.tokens <= excess_tokens]


def load_view(body: LoadReported) -> LoadView:
    """A load as policies see it."""
    return LoadView(
        name=body.instance,
        tokens=body.tokens,
        waiting_tokens=body.waiting_tokens,
        queued_tokens=body.queued_tokens,
        running=body.running,
        waiting=body.waiting,
        blocks_free=body.blocks_free,
        blocks_total=body.blocks_total,
        tokens_per_s=body.tokens_per_s,
        curve=body.curve,
    )


def lightest(loads: Iterable[LoadView], *, blocks: int, count: int) -> list[LoadView]:
    """At most ``count`` loads of those that carry least for their memory, equal ones by name.

    Those with so many blocks free come first: another one may have room by the time that it is asked.
    """

    def key(load: LoadView) -> tuple[bool, float, str]:
        return (load.blocks_free < blocks, load.demand / max(1, load.blocks_total), load.name)

    return sorted(loads, key=key)[:count]
