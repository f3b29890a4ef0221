"""Types and channels of brokers: part of the catalog (catalog.py)."""

from __future__ import annotations

from millrace.contracts.broker import (
    AskForMove,
    BoundaryMoved,
    DealEnded,
    DealPostponed,
    DealQueued,
    DealRefused,
    DealStarted,
    EvacuationAnnounced,
    GrantDeal,
    LoadReported,
    LoadsReported,
    MoveBid,
    NoBid,
    OfferDeal,
    WithdrawDeal,
)
from millrace.contracts.channels import Channel, Pattern, Role
from millrace.contracts.message import Body, ErrorReply

BROKER_TYPES: tuple[type[Body], ...] = (
    AskForMove,
    BoundaryMoved,
    DealEnded,
    DealPostponed,
    DealQueued,
    DealRefused,
    DealStarted,
    EvacuationAnnounced,
    GrantDeal,
    LoadReported,
    LoadsReported,
    MoveBid,
    NoBid,
    OfferDeal,
    WithdrawDeal,
)

BROKER_CHANNELS: tuple[Channel, ...] = (
    Channel(
        name="load",
        subject="load.{model}.{stage}",
        pattern=Pattern.PUBLISH,
        messages=(LoadReported, LoadsReported),
        senders=(Role.BROKER,),
        receivers=(Role.BROKER, Role.COORDINATOR),
        summary="What an instance carries and is forecast to carry, twice a second.",
    ),
    Channel(
        name="ask",
        subject="ask.{model}.{instance}",
        pattern=Pattern.PUBLISH,
        messages=(AskForMove,),
        senders=(Role.BROKER,),
        receivers=(Role.BROKER,),
        summary="Would this instance take a running sequence?",
    ),
    Channel(
        name="bid",
        subject="bid.{instance}",
        pattern=Pattern.PUBLISH,
        messages=(MoveBid, NoBid),
        senders=(Role.BROKER,),
        receivers=(Role.BROKER,),
        summary="A candidate's answer to the instance that asked.",
    ),
    Channel(
        name="deal",
        subject="deal.{instance}",
        pattern=Pattern.REQUEST,
        messages=(OfferDeal, GrantDeal, DealStarted, WithdrawDeal, DealEnded),
        replies=(DealQueued, DealStarted, DealPostponed, DealRefused, ErrorReply),
        senders=(Role.BROKER,),
        receivers=(Role.BROKER,),
        summary="Offer, grant, start, withdrawal and end of a deal; only the first two are answered.",
    ),
    Channel(
        name="evacuation",
        subject="evacuation.{instance}",
        pattern=Pattern.PUBLISH,
        messages=(EvacuationAnnounced,),
        senders=(Role.MIGRATOR,),
        receivers=(Role.BROKER,),
        summary="Everything shall leave this instance; from its migrator, which was asked, to its broker.",
    ),
    Channel(
        name="boundary",
        subject="boundary.{model}.{stage}",
        pattern=Pattern.PUBLISH,
        messages=(BoundaryMoved,),
        senders=(Role.BROKER,),
        receivers=(Role.BROKER, Role.INGRESS, Role.COORDINATOR),
        summary="Where a stage ends now, from the boundary's keeper.",
    ),
)
