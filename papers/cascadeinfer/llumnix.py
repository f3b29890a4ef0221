"""Llumnix's migration by freeness: instances short of memory per running sequence are paired with those that have most.

Freeness is how many more blocks each running sequence could get: (idle blocks - what the queue needs) / running
sequences. Sources are below a threshold, targets above it; the k-th poorest source gives its shortest sequence to the
k-th richest target, where that narrows the gap. Lengths and step times play no part.

Source: Llumnix (Sun et al., OSDI 2024), section 4.4, and its public code (pairs by rank, threshold of 3 blocks,
shortest running sequence first). Differs in that each source finds its own rank among the loads it has heard: there is
no global scheduler.
"""

from __future__ import annotations

import msgspec
from millrace.contracts.broker import MoveReason
from millrace.contracts.observers import CandidateScore
from millrace.policies.trading.view import (
    BidView,
    BurdenView,
    LoadView,
    MovableSequence,
    PickDecision,
    PickView,
    Trigger,
    TriggerView,
)

#: Tokens of a block where an instance holds none by which to tell.
_BLOCK_TOKENS = 16


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Threshold between sources and targets, and the number of offers.

    Attributes:
        freeness: Blocks per running sequence: instances below it are sources, those above it targets; at least 0. The
            public code's default moves nothing until memory is nearly gone.
        offers_max: Sequences offered at a time; at least 1.
    """

    freeness: float = 3.0
    offers_max: int = 1

    def __post_init__(self) -> None:
        """Refuses what cannot be. Raises ValueError naming the field."""
        if not 0 <= self.freeness < float("inf"):
            raise ValueError(f"freeness must be at least 0 and finite, is {self.freeness}")
        if self.offers_max < 1:
            raise ValueError(f"offers_max must be at least 1, is {self.offers_max}")


class State(msgspec.Struct, frozen=True):
    """It has none: pairs are made of the present loads."""


def freeness(load: LoadView, *, blocks: int = 0, sequences: int = 0) -> float:
    """Idle blocks per running sequence, with so many blocks and sequences more; infinite where nothing runs."""
    idle = load.blocks_free - (load.waiting_tokens + load.queued_tokens) / _block_tokens(load) - blocks
    running = load.running + sequences
    return idle / running if running > 0 else float("inf")


def trigger(view: TriggerView, parameters: Parameters, state: State, now_ns: int) -> tuple[Trigger, State]:
    """Offers the shortest sequences where a richer instance of the same rank takes them and stays the richer one.

    Nothing without peers, and where as many others are poorer as there are targets.
    """
    own = freeness(view.own)
    rich = sorted((load for load in view.peers if freeness(load) > parameters.freeness), key=_order, reverse=True)
    poorer = sum(_order(load) < _order(view.own) for load in view.peers)
    if own >= parameters.freeness or poorer >= len(rich):
        return Trigger(reason=f"{own:.1f} idle blocks per sequence, {len(rich)} instances above the threshold"), state
    target = rich[poorer]
    shortest = sorted(view.sequences, key=lambda each: (each.tokens, each.sequence))
    offers = [each.sequence for each in shortest if _narrows(each, view.own, target)]
    reason = f"{own:.1f} idle blocks per sequence against {freeness(target):.1f} at {target.name}"
    return Trigger(offers=tuple(offers[: parameters.offers_max]), reason=reason), state


def burden(view: BurdenView, parameters: Parameters) -> int:
    """Says nothing of delay: bids are compared by idle memory."""
    return 0


def pick(view: PickView, parameters: Parameters) -> PickDecision:
    """The bidder with the most idle blocks; equal ones by name. Nobody where nobody bids."""
    if not view.bids:
        return PickDecision(None, "nobody bids", [])
    order = sorted(view.bids, key=lambda bid: (-bid.blocks_idle, bid.bidder))
    scores = [CandidateScore(bid.bidder, -float(bid.blocks_idle)) for bid in order]
    if view.reason is MoveReason.BALANCE and not _lighter(order[0], view):
        return PickDecision(None, "no bidder has more idle memory than here", scores)
    return PickDecision(order[0].bidder, f"most idle memory: {order[0].blocks_idle} blocks with it", scores)


def _lighter(bid: BidView, view: PickView) -> bool:
    return bid.blocks_idle > view.own.blocks_free


def _narrows(sequence: MovableSequence, source: LoadView, target: LoadView) -> bool:
    """Whether the source stays the poorer one, or the gap at least shrinks without turning round."""
    before = freeness(target) - freeness(source)
    if target.running == 0:
        return True
    after = freeness(target, blocks=sequence.blocks, sequences=1) - freeness(
        source, blocks=-sequence.blocks, sequences=-1
    )
    return 0 < after < before


def _order(load: LoadView) -> tuple[float, str]:
    return (freeness(load), load.name)


def _block_tokens(load: LoadView) -> float:
    used = load.blocks_total - load.blocks_free
    return max(1.0, load.tokens / used) if used > 0 and load.tokens > 0 else _BLOCK_TOKENS
