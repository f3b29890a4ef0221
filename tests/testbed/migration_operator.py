"""A person at the bus: knows where every sequence runs, asks for migrations, reads what became of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Self

from millrace.contracts.codec import MalformedMessage, decode, encode
from millrace.contracts.ingress import TokensGenerated
from millrace.contracts.migration import MigrateSequence, MigrationFinished
from millrace.contracts.status import StatusSnapshot
from millrace.contracts.subjects import Subjects
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from tests.testbed.up_cluster import UpRig

#: A migration answers within its own deadlines; this is for a migrator that is gone.
ANSWER_S = 10.0


class Operator:
    """Knows where each sequence decodes, by its last tokens, and the last snapshot of each instance."""

    def __init__(self, rig: UpRig) -> None:
        self._rig = rig
        self.where: dict[str, str] = {}
        self.snapshots: dict[str, StatusSnapshot] = {}
        self.subjects = Subjects("local")
        self._heard = asyncio.Condition()

    async def __aenter__(self) -> Self:
        self.subjects = Subjects(self._rig.cluster_file()["cluster"])
        self._client = await self._rig.operator_bus()
        await self._client.subscribe(self.subjects.tokens("x").rpartition(".")[0] + ".*", cb=self._hear)
        await self.subscribe(self.subjects.status("x", "x").rpartition(".")[0][:-1] + "*.*", self._hear)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def _hear(self, message: Msg) -> None:
        try:
            body: Any = decode(message.data)
        except MalformedMessage:
            return
        if isinstance(body, TokensGenerated):
            for chunk in body.chunks:
                self.where[chunk.sequence] = body.instance
        elif isinstance(body, StatusSnapshot):
            self.snapshots[body.instance] = body
            async with self._heard:
                self._heard.notify_all()

    async def subscribe(self, subject: str, hear: Callable[[Msg], Coroutine[Any, Any, None]]) -> None:
        """Hears what passes on a subject, from now on."""
        await self._client.subscribe(subject, cb=hear)
        await self._client.flush()
        await self._client.flush()

    async def know(self, instances: int) -> None:
        """Waits until so many instances have told their state."""
        async with self._heard:
            await self._heard.wait_for(lambda: len(self.snapshots) >= instances)

    async def migrate(
        self, sequence: str, target: str, mode: str = "live", *, within_ms: int = 2_000
    ) -> MigrationFinished | None:
        """Moves a sequence away from where it is; None where nobody answered or it has ended."""
        source = self.where.get(sequence)
        if source is None or source == target:
            return None
        body = MigrateSequence(sequence=sequence, target=target, mode=mode, within_ms=within_ms)  # type: ignore[arg-type]
        try:
            answer = await self._client.request(
                self.subjects.migrate(source, "start"), encode(body), timeout=ANSWER_S, old_style=True
            )
        except (TimeoutError, NatsError):
            return None
        finished = decode(answer.data)
        return finished if isinstance(finished, MigrationFinished) else None

    async def at(self, step: str, act: Callable[[], None]) -> None:
        """Acts once, at the first message of a step seen from now on: ``engine.*.freeze``, ``ask.*.*``, ..."""
        acted = False

        async def hear(message: Msg) -> None:
            nonlocal acted
            if not acted:
                acted = True
                act()

        await self.subscribe(f"{self.subjects.prefix}.{step}", hear)

    def other(self, sequence: str) -> str:
        """Some instance that does not decode it."""
        here = self.where.get(sequence)
        return next(name for name in sorted(self.snapshots) if name != here)
