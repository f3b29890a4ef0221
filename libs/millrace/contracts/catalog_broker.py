"""Channels of brokers: part of the catalog (catalog.py)."""

from __future__ import annotations

from millrace.contracts.broker import AskForMove, BoundaryMoved, LoadsReported, MoveBid
from millrace.contracts.channels import Channel, Role

BROKER_CHANNELS: tuple[Channel, ...] = (
    Channel(
        name="load",
        subject="load.{model}.{stage}",
        messages=(LoadsReported,),
        senders=(Role.BROKER,),
        receivers=(Role.BROKER, Role.COORDINATOR, Role.MIGRATOR),
        summary="What an instance carries and is forecast to carry, twice a second.",
    ),
    Channel(
        name="ask",
        subject="ask.{model}.{instance}",
        messages=(AskForMove,),
        senders=(Role.BROKER,),
        receivers=(Role.BROKER,),
        summary="Would this instance take a running sequence?",
    ),
    Channel(
        name="bid",
        subject="bid.{source}.{bidder}",
        messages=(MoveBid,),
        senders=(Role.BROKER,),
        receivers=(Role.BROKER, Role.WORKER),
        summary="A candidate's answer to the instance that asked; the bidder's worker hears what it may be awarded.",
    ),
    Channel(
        name="boundary",
        subject="boundary.{model}.{stage}",
        messages=(BoundaryMoved,),
        senders=(Role.BROKER,),
        receivers=(Role.BROKER, Role.INGRESS, Role.COORDINATOR),
        summary="Where a stage ends now, from the boundary's keeper.",
    ),
)
