"""Listens to a cluster's bus: decisions, outcomes, and the snapshots of its instances, kept as they came."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from millrace.actor.bucket_reading import read_bucket
from millrace.cli.bus import open_bus
from millrace.cli.cluster import CLUSTER_FILE, ConnectionSettings, read_cluster_file
from millrace.contracts.codec import decode
from millrace.contracts.message import Body
from millrace.contracts.observers import DecisionMade, RequestFinished
from millrace.contracts.status import InstanceRecord, StatusSnapshot
from millrace.contracts.subjects import Subjects
from nats.aio.client import Client
from nats.aio.msg import Msg

#: How long what was published may take to come here.
SETTLE_S = 60.0

T = TypeVar("T", bound=Body)


class Listener:
    """Keeps what it hears; decodes nothing until asked, so that it costs the run little."""

    def __init__(self, bus: Client, store: Client, cluster: str) -> None:
        self._bus = bus
        self._store = store
        self._subjects = Subjects(cluster)
        self._heard: list[bytes] = []
        self.finished = 0

    async def subscribe(self) -> None:
        """Listens from now on."""
        subjects = self._subjects
        for subject in (subjects.decisions(), f"{subjects.prefix}.status.*.*"):
            await self._bus.subscribe(subject, cb=self._keep)
        await self._bus.subscribe(subjects.outcomes(), cb=self._count)

    async def _keep(self, message: Msg) -> None:
        self._heard.append(message.data)

    async def _count(self, message: Msg) -> None:
        self._heard.append(message.data)
        self.finished += 1

    async def settle(self, outcomes: int) -> None:
        """Waits for so many outcomes."""
        async with asyncio.timeout(SETTLE_S):
            while self.finished < outcomes:  # noqa: ASYNC110 -- a poll costs the run nothing
                await asyncio.sleep(0.05)

    def take(self) -> tuple[list[DecisionMade], list[RequestFinished], list[StatusSnapshot]]:
        """Return what was heard since the last call."""
        heard, self._heard = [decode(data) for data in self._heard], []
        self.finished = 0
        return _of(heard, DecisionMade), _of(heard, RequestFinished), _of(heard, StatusSnapshot)

    async def instances(self) -> list[InstanceRecord]:
        """Those that are registered, by name."""
        found = [decode(value) for value in await read_bucket(self._store, self._subjects.bucket("instance"))]
        return sorted(_of(found, InstanceRecord), key=lambda record: record.instance)


def _of(bodies: list[Body], kind: type[T]) -> list[T]:
    return [body for body in bodies if isinstance(body, kind)]


@asynccontextmanager
async def listening(folder: Path) -> AsyncIterator[Listener]:
    """Listens to the cluster whose files are in ``folder``."""
    file = read_cluster_file(folder / CLUSTER_FILE)
    connection = ConnectionSettings(
        cluster=file.cluster,
        url=file.nats_url,
        user=file.observer_user,
        password=file.observer_password,
        origin=str(folder),
    )
    async with open_bus(connection) as bus, open_bus(connection, store=True) as store:
        listener = Listener(bus, store, file.cluster)
        await listener.subscribe()
        yield listener
