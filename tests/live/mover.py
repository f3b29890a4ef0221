"""Moves whatever runs, to anywhere, several at a time and without a pause: an operator without mercy."""

import asyncio
import random
from typing import Any, Self

from millrace.contracts.codec import decode
from millrace.contracts.migration import MigrationFinished, MigrationMode, MigrationOutcome

from tests.testbed.migration_operator import Operator
from tests.testbed.up_cluster import UpRig
from tests.testbed.waiting import until

#: Migrations that are asked for at once: some move at any moment, twenty a second.
AT_ONCE = 3


class Mover(Operator):
    """Moves until the end of its ``async with``. ``finished``: migrations that were answered; ``heard``: any."""

    def __init__(self, rig: UpRig, *, seed: int = 1, modes: tuple[MigrationMode, ...] = (MigrationMode.LIVE,)) -> None:
        """Without ``modes`` it only looks."""
        super().__init__(rig)
        self._rng = random.Random(seed)
        self._modes = modes
        self._moving: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.finished: list[MigrationFinished] = []
        self.heard: list[MigrationFinished] = []

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        await self.subscribe(self.subjects.migrations(), self._hear_end)
        if self._modes:
            self._tasks.add(asyncio.create_task(self._go_on()))
        return self

    async def __aexit__(self, *raised: Any) -> None:
        for task in list(self._tasks):
            task.cancel()
        await super().__aexit__(*raised)

    @property
    def moved(self) -> int:
        return sum(body.outcome is MigrationOutcome.MOVED for body in self.finished)

    def places(self) -> list[tuple[str, str]]:
        """Instances, each with a sequence that decodes there."""
        return [(name, s.sequence) for name, told in self.snapshots.items() for s in told.running if s.output_tokens]

    async def place(self) -> tuple[str, str]:
        """The first of them."""
        places: list[tuple[str, str]] = await until(self.places, look_s=0.02)
        return places[0]

    async def seen(self, count: int) -> None:
        """Waits until so many sequences decode."""
        await until(lambda: len(self.places()) >= count)

    async def _hear_end(self, message: Any) -> None:
        body = decode(message.data)
        if isinstance(body, MigrationFinished):
            self.heard.append(body)

    async def _go_on(self) -> None:
        while True:
            places = [(instance, sequence) for instance, sequence in self.places() if sequence not in self._moving]
            if places and len(self._moving) < AT_ONCE and len(self.snapshots) > 1:
                instance, sequence = self._rng.choice(places)
                target = self._rng.choice([name for name in sorted(self.snapshots) if name != instance])
                self._moving.add(sequence)
                task = asyncio.create_task(self._move(sequence, target))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            await asyncio.sleep(0.01)

    async def _move(self, sequence: str, target: str) -> None:
        answer = await self.migrate(sequence, target, self._rng.choice(self._modes), within_ms=200)
        self.finished += [answer] if answer else []
        await asyncio.sleep(0.1)  # a snapshot may still show it where it was
        self._moving.discard(sequence)
