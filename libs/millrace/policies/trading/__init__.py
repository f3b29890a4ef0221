"""Trading policies by name: which running sequences an instance offers, what one costs a bidder, which bid wins.

The order of reasons, the sets of targets and the fences (cool-down, moves in a life, pay-back) are the broker's; a
policy decides about balance, and between bids for every reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from millrace.policies.registry import Policy, Registry
from millrace.policies.trading.delay import policy as delay
from millrace.policies.trading.none import policy as none
from millrace.policies.trading.view import (
    BidView,
    BurdenView,
    JoinView,
    LoadView,
    MovableSequence,
    PickDecision,
    PickView,
    Trigger,
    TriggerView,
)

__all__ = [
    "TRADING_POLICIES",
    "BidView",
    "BurdenView",
    "JoinView",
    "LoadView",
    "MovableSequence",
    "PickDecision",
    "PickView",
    "TradingPolicy",
    "Trigger",
    "TriggerView",
]


class TradingPolicy(Policy, frozen=True, kw_only=True):
    """One policy of the registry.

    Attributes:
        trigger: (view, parameters, state, now_ns) -> (Trigger, next state). Runs at the source, several times a second.
        burden: (view, parameters) -> ns that the bid says. Runs at a bidder.
        pick: (view, parameters) -> PickDecision. Runs at the source, when enough bids came or the time is over.
        initial_state: State of one instance before the first trigger.
        needs_forecast: Whether asks and bids carry forecasts (``gain_ns``, ``stay_ns``, ``BurdenView.forecast``). The
            broker then orders what ``trigger`` offers by the forecast gain.
    """

    trigger: Callable[[TriggerView, Any, Any, int], tuple[Trigger, Any]]
    burden: Callable[[BurdenView, Any], int]
    pick: Callable[[PickView, Any], PickDecision]
    initial_state: Any
    needs_forecast: bool = False


#: To add a policy: its folder, its import above and a word here.
TRADING_POLICIES = Registry("trading", TradingPolicy, (none, delay))
