"""CascadeInfer's bid-ask rule, as published.

Source: CascadeInfer, section 4.4. The paper does not say which requests an outlier offers: here the longest ones that
do not exceed what it carries above the mean.
"""

from __future__ import annotations

import msgspec
from millrace.contracts.observers import CandidateScore
from millrace.policies.trading.view import BurdenView, PickDecision, PickView, Trigger, TriggerView, fitting

name = "cascade"


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Thresholds of the paper.

    Attributes:
        excess: An instance is an outlier where its demand exceeds the mean of its set by this share; at least 0.
        offers_max: Sequences offered at a time; at least 1.
    """

    excess: float = 0.25
    offers_max: int = 8

    def __post_init__(self) -> None:
        """Refuses what cannot be. Raises ValueError naming the field."""
        if not 0 <= self.excess < float("inf"):
            raise ValueError(f"excess must be at least 0 and finite, is {self.excess}")
        if self.offers_max < 1:
            raise ValueError(f"offers_max must be at least 1, is {self.offers_max}")


class State(msgspec.Struct, frozen=True):
    """It has none: an outlier acts at once."""


def trigger(view: TriggerView, parameters: Parameters, state: State, now_ns: int) -> tuple[Trigger, State]:
    """Offers where the demand exceeds the mean by 25 %; nothing without peers."""
    loads = (view.own, *view.peers)
    mean = sum(load.demand for load in loads) / len(loads)
    demand = view.own.demand
    if not view.peers or demand <= mean * (1 + parameters.excess):
        return Trigger(reason=f"{demand} tokens, mean of the set {mean:.0f}"), state
    chosen = sorted(fitting(view.sequences, demand - mean), key=lambda each: (-each.tokens, each.sequence))
    offers = tuple(each.sequence for each in chosen[: parameters.offers_max])
    return Trigger(offers=offers, reason=f"{demand} tokens, {demand / mean - 1:.0%} above the mean of the set"), state


def burden(view: BurdenView, parameters: Parameters) -> int:
    """Says nothing of delay: bids are compared by load."""
    return 0


def pick(view: PickView, parameters: Parameters) -> PickDecision:
    """Drops the more loaded half, takes the first of the others that answered.

    Half of one bid is that bid. Equal loads stay in order of arrival. Nobody where nobody bids. The paper keeps the
    three earliest starts besides; a bid here is a reservation, so that every move starts at once.
    """
    if not view.bids:
        return PickDecision(None, "nobody bids", [])
    by_load = sorted(view.bids, key=lambda bid: bid.load_tokens)
    lighter = by_load[: len(by_load) - len(by_load) // 2]
    chosen = next(bid for bid in view.bids if bid in lighter)
    notes = ["" if bid in lighter else "more loaded half" for bid in by_load]
    scores = [
        CandidateScore(bid.bidder, float(bid.load_tokens), note) for bid, note in zip(by_load, notes, strict=True)
    ]
    reason = f"first to answer of {len(lighter)}: {chosen.load_tokens} tokens"
    return PickDecision(chosen.bidder, reason, scores)
