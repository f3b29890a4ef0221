"""Streams that keep engines busy while others are watched; in this process or in one of their own."""

from __future__ import annotations

import asyncio
import multiprocessing
from multiprocessing.connection import Connection
from random import Random
from typing import Any

import httpx

from tests.testbed.timed_streams import Api, TimedStream, client, play, prompt_ids

#: From when all decode, seconds until the first measurement: their prompts are computed then, and who began first no
#: longer stands out.
BEGIN_S = 2.0
#: Output tokens of each stream but the first ones, which are shorter.
TOKENS = 1500
#: Longest that they may take to begin, and to end, seconds.
PATIENCE_S = 60.0

Windows = list[tuple[float, float]]


class Address:
    """An Api that can be told to another process."""

    def __init__(self, rig: Api) -> None:
        self.url, self.model = rig.url, rig.model


class Others:
    """Each stream is followed by another when it ends."""

    def __init__(self, rig: Api, http: httpx.AsyncClient, *, count: int, seed: int) -> None:
        self._rng = Random(seed)
        self._rig, self._http = rig, http
        self.streams: list[TimedStream] = []
        self._tasks = [asyncio.create_task(self._keep()) for _ in range(count)]

    async def _keep(self) -> None:
        tokens = self._rng.randint(100, TOKENS)  # else all would end at once, and all prompts of the next be computed
        while True:
            stream = TimedStream()
            self.streams.append(stream)
            prompt = prompt_ids(self._rng, self._rng.randint(50, 400))
            await play(self._http, self._rig, stream, prompt=prompt, max_tokens=tokens, ignore_eos=True)
            tokens = TOKENS

    async def stop(self) -> None:
        """Cancels them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def begun(self) -> int:
        """Return the number of streams that have said anything."""
        return sum(bool(stream.times) for stream in self.streams)

    def intervals(self, inside: Windows, *, within: bool) -> list[float]:
        """Intervals that end inside one of the windows, or outside of all."""
        found: list[float] = []
        for stream in self.streams:
            for earlier, later in zip(stream.times, stream.times[1:], strict=False):
                if any(a <= later and earlier <= b for a, b in inside) is within:
                    found.append(later - earlier)
        return found


class OthersApart:
    """The same in a process of their own: 124 streams keep one reader busy, and the one that is watched would wait for
    it.
    """

    def __init__(self, rig: Api, *, count: int, seed: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._count = count
        self._there, there = spawn.Pipe()
        arguments = (there, Address(rig), count, seed)
        self._process = spawn.Process(target=_keep, args=arguments, daemon=True)

    async def begin(self) -> None:
        """Starts them, and waits until all decode."""
        if not self._count:
            return
        self._process.start()
        waited = 0.0
        while await self._ask("begun", ()) < self._count:
            await asyncio.sleep(0.2)
            waited += 0.2
            assert waited < PATIENCE_S, "the other streams do not begin"
        await asyncio.sleep(BEGIN_S)

    async def intervals(self, inside: Windows, *, within: bool) -> list[float]:
        """As Others does."""
        found: list[float] = await self._ask("intervals", (inside, within)) if self._count else []
        return found

    async def stop(self) -> None:
        """Ends them and their process."""
        if not self._count:
            return
        await self._ask("stop", ())
        await asyncio.to_thread(self._process.join, PATIENCE_S)

    async def _ask(self, what: str, words: tuple[Any, ...]) -> Any:
        self._there.send((what, words))
        return await asyncio.to_thread(self._there.recv)


def _keep(asked: Connection, rig: Api, count: int, seed: int) -> None:
    async def answer() -> None:
        async with client() as http:
            others = Others(rig, http, count=count, seed=seed)
            while True:
                what, words = await asyncio.to_thread(asked.recv)
                if what == "begun":
                    asked.send(others.begun())
                elif what == "intervals":
                    asked.send(others.intervals(words[0], within=words[1]))
                else:
                    await others.stop()
                    asked.send(None)
                    return

    asyncio.run(answer())
