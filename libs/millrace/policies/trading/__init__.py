"""Trading policies by name: which running sequences an instance offers, what one costs a bidder, which bid wins.

The order of reasons, the sets of targets and the fences (cool-down, moves in a life, pay-back) are the broker's; a
policy decides about balance, and between bids for every reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from millrace.policies.trading.ares import policy as ares
from millrace.policies.trading.cascade import policy as cascade
from millrace.policies.trading.delay import policy as delay
from millrace.policies.trading.llumnix import policy as llumnix
from millrace.policies.trading.none import policy as none
from millrace.policies.trading.reactive import policy as reactive
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


class TradingPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """One policy of the registry.

    Attributes:
        trigger: (view, parameters, state, now_ns) -> (Trigger, next state). Runs at the source, several times a second.
        burden: (view, parameters) -> ns that the bid says. Runs at a bidder.
        pick: (view, parameters) -> PickDecision. Runs at the source, when enough bids came or the time is over.
        parameters: Struct of its parameters; every field has a default.
        initial_state: State of one instance before the first trigger.
        needs_forecast: Whether asks and bids carry forecasts (``gain_ns``, ``stay_ns``, ``BurdenView.forecast``). The
            broker then orders what ``trigger`` offers by the forecast gain.
    """

    name: str
    trigger: Callable[[TriggerView, Any, Any, int], tuple[Trigger, Any]]
    burden: Callable[[BurdenView, Any], int]
    pick: Callable[[PickView, Any], PickDecision]
    parameters: type[msgspec.Struct]
    initial_state: Any
    needs_forecast: bool = False


#: To add a policy: its import above and an entry here.
_ALL = (
    TradingPolicy(
        name="none",
        trigger=none.trigger,
        burden=none.burden,
        pick=none.pick,
        parameters=none.Parameters,
        initial_state=none.State(),
    ),
    TradingPolicy(
        name="cascade",
        trigger=cascade.trigger,
        burden=cascade.burden,
        pick=cascade.pick,
        parameters=cascade.Parameters,
        initial_state=cascade.State(),
    ),
    TradingPolicy(
        name="delay",
        trigger=delay.trigger,
        burden=delay.burden,
        pick=delay.pick,
        parameters=delay.Parameters,
        initial_state=delay.State(),
        needs_forecast=True,
    ),
    TradingPolicy(
        name="ares",
        trigger=ares.trigger,
        burden=ares.burden,
        pick=ares.pick,
        parameters=ares.Parameters,
        initial_state=ares.State(),
        needs_forecast=True,
    ),
    TradingPolicy(
        name="llumnix",
        trigger=llumnix.trigger,
        burden=llumnix.burden,
        pick=llumnix.pick,
        parameters=llumnix.Parameters,
        initial_state=llumnix.State(),
    ),
    TradingPolicy(
        name="reactive",
        trigger=reactive.trigger,
        burden=reactive.burden,
        pick=reactive.pick,
        parameters=reactive.Parameters,
        initial_state=reactive.State(),
    ),
)

TRADING_POLICIES: Mapping[str, TradingPolicy] = MappingProxyType({p.name: p for p in _ALL})
