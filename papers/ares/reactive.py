"""Rescheduling without prediction: what ARES is compared with.

An instance whose present load exceeds the mean of its set, or whose memory is nearly full, offers the sequence whose
move lowers the variance of the present loads most. Nothing is asked about what is still to come.

Source: ARES, section 6.1, baseline "vLLM + rescheduling"; the paper says no more of it than that it acts on current
state. Threshold and memory rule are ours.
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
    maximum_falls,
)


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Conditions for an offer.

    Attributes:
        theta: An instance is overloaded where its demand exceeds the mean of its set by this share; at least 0.
        memory: Or where this share of its blocks is in use and a peer uses less; above 0, at most 1.
        offers_max: Sequences offered at a time; at least 1.
    """

    theta: float = 0.1
    memory: float = 0.95
    offers_max: int = 1

    def __post_init__(self) -> None:
        """Refuses what cannot be. Raises ValueError naming the field."""
        if not 0 <= self.theta < float("inf"):
            raise ValueError(f"theta must be at least 0 and finite, is {self.theta}")
        if not 0 < self.memory <= 1:
            raise ValueError(f"memory must be above 0 and at most 1, is {self.memory}")
        if self.offers_max < 1:
            raise ValueError(f"offers_max must be at least 1, is {self.offers_max}")


class State(msgspec.Struct, frozen=True):
    """It has none: each decision is made of the present loads alone."""


def trigger(view: TriggerView, parameters: Parameters, state: State, now_ns: int) -> tuple[Trigger, State]:
    """Offers what lowers the variance most beside the lightest peer that has room; nothing without peers."""
    loads = (view.own, *view.peers)
    mean = sum(load.demand for load in loads) / len(loads)
    short = view.own.blocks_total - view.own.blocks_free > parameters.memory * view.own.blocks_total
    reason = f"{view.own.demand} tokens, mean of the set {mean:.0f}" + (", memory nearly full" if short else "")
    if not view.peers or (view.own.demand <= mean * (1 + parameters.theta) and not short):
        return Trigger(reason=reason), state
    lightest = min(view.peers, key=lambda peer: (peer.demand, peer.name))
    gains = {each.sequence: _gain(each, view.own, lightest) for each in view.sequences if _fits(each, lightest)}
    chosen = sorted((name for name, gain in gains.items() if gain > 0), key=lambda name: (-gains[name], name))
    return Trigger(offers=tuple(chosen[: parameters.offers_max]), reason=reason), state


def _gain(sequence: MovableSequence, own: LoadView, target: LoadView) -> int:
    """By how much the variance falls, but for a factor that is the same for all."""
    return sequence.tokens * (own.demand - target.demand - sequence.tokens)


def _fits(sequence: MovableSequence, target: LoadView) -> bool:
    return sequence.blocks <= target.blocks_free


def burden(view: BurdenView, parameters: Parameters) -> int:
    """The bidder's present tokens."""
    return view.own.demand


def pick(view: PickView, parameters: Parameters) -> PickDecision:
    """The bidder with the least tokens; equal ones by start and name.

    For balance the larger of the two loads must fall. Nobody where nobody bids.
    """
    if not view.bids:
        return PickDecision(None, "nobody bids", [])
    order = sorted(view.bids, key=lambda bid: (bid.load_tokens, bid.bidder))
    scores = [CandidateScore(bid.bidder, float(bid.load_tokens)) for bid in order]
    if view.reason is MoveReason.BALANCE and not _falls(view, order[0]):
        return PickDecision(None, "the larger load would not fall", scores)
    return PickDecision(order[0].bidder, f"lightest of {len(order)}: {order[0].load_tokens} tokens", scores)


def _falls(view: PickView, bid: BidView) -> bool:
    return maximum_falls(view.own.demand, bid.load_tokens, view.sequence.tokens)
