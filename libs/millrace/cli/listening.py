"""Fills a ClusterView from the bus: what is published as it comes, plan and registrations from the KV store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from millrace.actor.bucket_reading import read_bucket
from millrace.actor.nats_client import end_task
from millrace.cli.bus import open_bus
from millrace.cli.cluster import ConnectionSettings
from millrace.cli.cluster_view import ClusterView
from millrace.contracts.codec import MalformedMessage, decode
from millrace.contracts.message import Body
from millrace.contracts.subjects import Subjects

#: Services say they are there every second: after this long each one has been heard.
LISTEN_S = 1.1

#: How often the KV store is read again while watching.
STORE_S = 2.0

#: One read of the store; without JetStream the table simply lacks stages.
STORE_TIMEOUT_S = 1.0

#: What the view needs of the store.
BUCKETS = ("plan", "instance", "cascade")


@asynccontextmanager
async def listen(connection: ConnectionSettings) -> AsyncIterator[ClusterView]:
    """A view that fills itself while the context lasts."""
    view = ClusterView()
    subjects = Subjects(connection.cluster)

    async def on_message(raw: Msg) -> None:
        if body := _readable(raw.data):
            view.hear(body, time.time_ns())

    def on_state(state: str) -> None:
        view.connected = state == "reconnected"

    async with open_bus(connection, on_state=on_state) as bus, open_bus(connection, store=True) as store:
        await bus.subscribe(subjects.summaries(), cb=on_message)
        await bus.subscribe(subjects.presences(), cb=on_message)
        await bus.subscribe(subjects.boundaries(), cb=on_message)
        task = asyncio.create_task(_follow_store(store, subjects, view))
        try:
            yield view
        finally:
            await end_task(task)


async def _follow_store(store: Client, subjects: Subjects, view: ClusterView) -> None:
    while True:
        for name in BUCKETS:
            try:
                values = await asyncio.wait_for(read_bucket(store, subjects.bucket(name)), STORE_TIMEOUT_S)
            except (TimeoutError, nats.errors.Error):
                continue  # no JetStream, no bucket yet, or not allowed: the summaries tell the most
            bodies = [body for value in values if (body := _readable(value))]
            view.hear_stored(name, bodies, time.time_ns())
        await asyncio.sleep(STORE_S)


def _readable(payload: bytes) -> Body | None:
    try:
        return decode(payload)
    except MalformedMessage:
        return None  # tap shows those; a table of the cluster has no row for them
