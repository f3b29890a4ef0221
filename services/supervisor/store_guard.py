"""Asks a nats-server whether JetStream is well, and makes the buckets where they are gone.

A stream whose file could once not be written refuses every write until the server is started anew, also when there is
room again. The server says so in its health, which a user of the system account may ask for; the actor decides.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import nats
from millrace.actor.bus_tls import IDENTITY, bus_context
from millrace.actor.config import BusConfig
from millrace.actor.errors import BusError, ConfigError
from millrace.actor.nats_client import close_client
from millrace.contracts.permissions import HEALTH_SUBJECT, health_user
from nats.aio.client import Client
from nats.aio.subscription import Subscription

from services.supervisor.buckets import create_buckets
from services.supervisor.effects import MachineChecked
from services.supervisor.layout import server_name
from services.supervisor.preflight import STORE

#: Pause between two checks, seconds.
CHECK_S = 1.0

#: How long the server may take to answer, seconds.
ANSWER_S = 2.0

#: A disk with less has no room for logs, and NATS none for its streams.
ROOM_BYTES = 16 * 1024 * 1024

#: Last words of a server whose files a power cut, or a disk, has torn.
UNREADABLE = "Can't start JetStream"


class StoreGuard:
    """Looks after one server of a cluster, and the store.

    Attributes:
        name: Of the server's process.
    """

    def __init__(self, bus: BusConfig, directory: Path, name: str = "nats", index: int = 0) -> None:
        """``index``: of the server among the bus's."""
        self.name = name
        self._replicas = len(bus.servers)
        self._bus = msgspec.structs.replace(bus, servers=[bus.servers[index]])
        self._directory = directory
        self._client: Client | None = None
        self._answers: Subscription | None = None
        self._asked = 0
        self._identity_ns = 0

    async def wait_until_well(self, limit_s: float) -> None:
        """Returns once the store is there, with its buckets.

        Raises:
            BusError: it is not within the limit.
        """
        problem = "it does not answer"
        try:
            async with asyncio.timeout(limit_s):
                while problem := await self._problem():  # noqa: ASYNC110 the server is asked, it tells nobody
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise BusError(f"{self.name} is not healthy: {problem}") from None

    async def check(self) -> MachineChecked:
        """One look at the store and at the disk."""
        free = shutil.disk_usage(self._directory).free
        disk = "" if free >= ROOM_BYTES else f"no space is left for {self._directory}"
        room = shutil.disk_usage(self._directory / STORE).free >= ROOM_BYTES
        renewed = self._renewed()
        return MachineChecked(server=self.name, store=await self._problem(), room=room, disk=disk, renewed=renewed)

    def put_aside(self, said: Iterable[str]) -> None:
        """Moves files away that the server could not read, so that it begins with none: its peers have them, or whoever
        owns a key writes it anew.

        Args:
            said: The end of its log.
        """
        folder = self._directory / STORE / (self.name if self._replicas > 1 else "")
        files, aside = folder / "jetstream", folder / "unreadable"
        if any(UNREADABLE in line for line in said) and files.is_dir() and shutil.disk_usage(folder).free >= ROOM_BYTES:
            shutil.rmtree(aside, ignore_errors=True)
            files.rename(aside)

    def _renewed(self) -> bool:
        """Whether the certificate is another one than at the last look. At the first it is: the server may have read
        the one before, under an earlier supervisor.
        """
        if not self._bus.tls:
            return False
        try:
            before, self._identity_ns = self._identity_ns, (Path(self._bus.tls) / IDENTITY).stat().st_mtime_ns
        except OSError:
            return False
        return self._identity_ns != before

    async def close(self) -> None:
        if self._client is not None:
            await close_client(self._client)

    async def _problem(self) -> str:
        """Reason why the store does not take writes; empty where it does."""
        try:
            if self._client is None or not self._client.is_connected:
                await self._connect()
            assert self._client is not None
            health = await asyncio.wait_for(self._health(self._client), ANSWER_S)
        except (BusError, ConfigError, OSError, nats.errors.Error, TimeoutError) as error:
            return str(error) or type(error).__name__
        return "" if health.get("status") == "ok" else str(health.get("error", "unknown"))

    async def _health(self, client: Client) -> dict[str, Any]:
        """Every server of the cluster answers; this one's word counts."""
        if self._answers is None:
            self._answers = await client.subscribe(f"{client.new_inbox()}.*")
        self._asked += 1
        question = f"{self._answers.subject[:-1]}{self._asked}"
        await client.publish(HEALTH_SUBJECT, reply=question)
        while True:
            told = await self._answers.next_msg(timeout=ANSWER_S)
            answer = json.loads(told.data)
            if told.subject == question and answer.get("server", {}).get("name") == server_name(self.name):
                return dict(answer.get("data", {}))

    async def _connect(self) -> None:
        """A new connection may mean a new server, perhaps without its buckets."""
        await self.close()
        self._client = self._answers = None
        user = health_user(self._bus.user)
        client = await nats.connect(
            self._bus.servers,
            user=user,
            password=self._bus.password,
            inbox_prefix=f"_INBOX.{user}",
            tls=bus_context(self._bus.tls),
            connect_timeout=1,
            allow_reconnect=False,
            error_cb=_ignore,
        )
        try:
            await create_buckets(self._bus, replicas=self._replicas)
        except BaseException:
            await close_client(client)
            raise
        self._client = client


async def _ignore(error: Exception) -> None:
    """The next check says what is wrong."""
