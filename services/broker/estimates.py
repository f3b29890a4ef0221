"""Bids as they are expected from heard loads: whether asking is worth it at all."""

from __future__ import annotations

from collections.abc import Iterable

from millrace.contracts.status import BatchComposition
from millrace.enginemodel.forecast.question import LeaveForecast
from millrace.policies.trading import BidView, BurdenView, JoinView, LoadView

from services.broker.intents import asked_sequence
from services.broker.state import BrokerContext, OutgoingAsk, OwnInstance

#: An estimate may be wrong by so much to the sequence's advantage: who asks in vain loses a few messages, who does not
#: ask loses a move.
OPTIMISM = 0.8


def estimated_bids(
    ctx: BrokerContext, own: OwnInstance, ask: OutgoingAsk, leave: LeaveForecast | None, targets: Iterable[LoadView]
) -> list[BidView]:
    """Bids that those instances would make, if they are of the same kind as this one and run on as heard."""
    body, sequence = ask.body, asked_sequence(ask.body)
    bids = []
    for load in targets:
        forecast = _joined(own, load, sequence.tokens, leave)
        view = BurdenView(own=load, sequence=sequence, reason=body.reason, forecast=forecast)
        bids.append(
            BidView(
                bidder=load.name,
                burden_ns=ctx.policy.burden(view, ctx.parameters),
                load_tokens=load.demand,
                blocks_idle=max(0, load.blocks_free - body.blocks),
                rest_ns=forecast.rest_ns if forecast is not None else 0,
            )
        )
    return bids


def _joined(own: OwnInstance, load: LoadView, tokens: int, leave: LeaveForecast | None) -> JoinView | None:
    """The load with the sequence: each of its steps takes longer for everybody, as long as it runs there."""
    if leave is None or own.forecasts is None or leave.rest_tokens <= 0:
        return None
    alone_ns = own.forecasts.step_ns(BatchComposition(decodes=load.running, context_tokens=load.tokens))
    joined = BatchComposition(decodes=load.running + 1, context_tokens=load.tokens + tokens)
    joined_ns = own.forecasts.step_ns(joined)
    if joined_ns is None:
        return None
    longer_ns = max(0, joined_ns - (alone_ns or 0)) if load.running else 0
    rest = leave.rest_tokens
    return JoinView(
        others_delay_ns=int(OPTIMISM * longer_ns * load.running * rest), rest_ns=int(OPTIMISM * joined_ns * rest)
    )
