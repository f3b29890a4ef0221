"""Instances that a trade message names, and the answers to messages that are not for us. Pure."""

from __future__ import annotations

from typing import Any

from millrace.actor.effects import Effect, Reply
from millrace.contracts.broker import (
    AskForMove,
    DealEnded,
    DealRefusal,
    DealRefused,
    DealStarted,
    GrantDeal,
    MoveBid,
    NoBid,
    OfferDeal,
    WithdrawDeal,
)
from millrace.contracts.message import ErrorReply, Message


def trade_peer(body: Any, *, to: str) -> str | None:
    """The other side of a trade, by what the message says of itself; None where it is none of that instance's."""
    match body:
        case AskForMove(source=source):
            return source
        case MoveBid(source=source, bidder=bidder) | NoBid(source=source, bidder=bidder):
            return bidder if source == to else None
        case OfferDeal(source=source, target=target) | WithdrawDeal(source=source, target=target):
            return source if target == to else None
        case DealEnded(source=source, target=target) | DealStarted(source=source, target=target):
            return source if target == to else None
        case GrantDeal(source=source, target=target):
            return target if source == to else None
        case _:
            return None


def unexpected(message: Message) -> list[Effect]:
    """Answers what a broker does not take there."""
    detail = f"a broker does not take {type(message.body).__name__} here"
    body = ErrorReply(reason="unexpected", detail=detail)
    return [Reply(to=message.reply_to, body=body)] if message.reply_to else []


def forged(message: Message) -> list[Effect]:
    """Whoever waits hears why; nothing else happens."""
    body = message.body
    if not message.reply_to:
        return []
    return [
        Reply(to=message.reply_to, body=DealRefused(deal=body.deal, sequence=body.sequence, reason=DealRefusal.FORGED))
    ]
