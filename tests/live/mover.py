"""Moves whatever runs, to anywhere, several at a time and without a pause: an operator without mercy."""

from __future__ import annotations

import asyncio
import random
from types import TracebackType
from typing import Any

import nats.errors
from millrace.contracts.codec import decode, encode
from millrace.contracts.migration import MigrateSequence, MigrationFinished, MigrationMode, MigrationOutcome
from millrace.contracts.status import StatusSnapshot
from millrace.contracts.subjects import Subjects

from tests.testbed.up_cluster import UpRig
from tests.testbed.waiting import until

#: Migrations that are asked for at once: some move at any moment, twenty a second.
AT_ONCE = 3

ANSWER_S = 8.0


class Mover:
    """Use as ``async with Mover(rig) as mover``; it moves until the end of the block.

    Attributes:
        finished: What became of each migration that was answered.
        heard: What was published of any.
        unanswered: Questions without an answer: their migrator had died.
    """

    def __init__(
        self,
        rig: UpRig,
        *,
        seed: int = 1,
        modes: tuple[MigrationMode, ...] = (MigrationMode.LIVE,),
        at_once: int = AT_ONCE,
    ) -> None:
        """Without ``modes`` it only looks."""
        self._rig = rig
        self._subjects = Subjects(rig.cluster_file()["cluster"])
        self._rng = random.Random(seed)
        self._modes = modes
        self._at_once = at_once
        self._running: dict[str, list[str]] = {}
        self._moving: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.finished: list[MigrationFinished] = []
        self.heard: list[MigrationFinished] = []
        self.unanswered = 0

    async def __aenter__(self) -> Mover:
        self._bus = await self._rig.operator_bus()
        await self._bus.subscribe(f"{self._subjects.prefix}.status.*.*", cb=self._hear)
        await self._bus.subscribe(self._subjects.migrations(), cb=self._hear)
        if self._modes:
            self._tasks.add(asyncio.create_task(self._go_on()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        for task in list(self._tasks):
            task.cancel()
        await self._bus.close()

    @property
    def moved(self) -> int:
        return sum(body.outcome is MigrationOutcome.MOVED for body in self.finished)

    async def place(self) -> tuple[str, str]:
        """An instance with a sequence that decodes there, and the sequence."""
        while True:
            for instance, there in self._running.items():
                if there:
                    return instance, there[0]
            await asyncio.sleep(0.02)

    async def seen(self, count: int) -> None:
        """Waits until so many sequences decode."""
        await until(lambda: sum(map(len, self._running.values())) >= count)

    def outcomes(self) -> dict[str, int]:
        """Count how often each outcome and refusal came."""
        counts: dict[str, int] = {}
        for body in self.finished:
            what = f"{body.outcome} {body.refusal or ''}".strip()
            counts[what] = counts.get(what, 0) + 1
        return counts

    async def _hear(self, message: Any) -> None:
        body = decode(message.data)
        if isinstance(body, StatusSnapshot):
            self._running[body.instance] = [s.sequence for s in body.running if s.output_tokens >= 1]
        elif isinstance(body, MigrationFinished):
            self.heard.append(body)

    async def _go_on(self) -> None:
        while True:
            places = [(i, s) for i, there in self._running.items() for s in there if s not in self._moving]
            others = sorted(self._running)
            if places and len(self._moving) < self._at_once and len(others) > 1:
                instance, sequence = self._rng.choice(places)
                target = self._rng.choice([name for name in others if name != instance])
                self._moving.add(sequence)
                task = asyncio.create_task(self._move(instance, sequence, target))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            await asyncio.sleep(0.01)

    async def _move(self, instance: str, sequence: str, target: str) -> None:
        mode = self._rng.choice(self._modes)
        body = MigrateSequence(sequence=sequence, target=target, within_ms=200, mode=mode)
        try:
            subject = self._subjects.migrate(instance, "start")
            answer = decode((await self._bus.request(subject, encode(body), timeout=ANSWER_S)).data)
            if isinstance(answer, MigrationFinished):
                self.finished.append(answer)
        except (TimeoutError, nats.errors.Error):
            self.unanswered += 1
        await asyncio.sleep(0.1)  # a snapshot may still show it where it was
        self._moving.discard(sequence)
