"""No balance: sequences move only where drains, roles, memory or boundaries want it."""

from __future__ import annotations

from millrace.contracts.observers import CandidateScore
from millrace.policies.registry import Nothing
from millrace.policies.trading.view import BidView, BurdenView, PickDecision, PickView, Trigger, TriggerView


def trigger(view: TriggerView, parameters: Nothing, state: Nothing, now_ns: int) -> tuple[Trigger, Nothing]:
    """Offers nothing."""
    return Trigger(reason="no balancing"), state


def burden(view: BurdenView, parameters: Nothing) -> int:
    """Says nothing of delay."""
    return 0


def pick(view: PickView, parameters: Nothing) -> PickDecision:
    """The bidder with the most idle blocks; equal ones by name. Nobody where nobody bids."""
    if not view.bids:
        return PickDecision(None, "nobody bids", [])

    def key(bid: BidView) -> tuple[int, str]:
        return (-bid.blocks_idle, bid.bidder)

    chosen = min(view.bids, key=key)
    scores = [CandidateScore(bid.bidder, -float(bid.blocks_idle)) for bid in sorted(view.bids, key=key)]
    return PickDecision(chosen.bidder, f"most idle memory: {chosen.blocks_idle} blocks with it", scores)
