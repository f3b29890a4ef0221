"""Flips of roles under load: streams that run all the time, and an operator who gives one role after the other."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from itertools import cycle
from random import Random
from typing import Any

import httpx
import msgspec
from millrace.contracts.migration import MigrationFinished, MigrationOutcome
from millrace.contracts.plan import InstanceRole

from tests.testbed.role_operator import RoleOperator
from tests.testbed.timed_streams import TimedStream, client, play
from tests.testbed.up_cluster import UpRig, prompt_text

BOTH, PREFILL, DECODE = InstanceRole

#: Orders that never leave a phase without anybody. Half of the changes need the last hop.
ORDERS = (
    ("worker-0", PREFILL), ("worker-1", DECODE), ("worker-1", BOTH), ("worker-0", DECODE),
    ("worker-1", PREFILL), ("worker-1", BOTH), ("worker-0", BOTH),
)  # fmt: skip

#: Shorter than the defaults (10, 2 and 5 s), so that a hundred flips take minutes.
FENCES = {"gap_s": 1.0, "settle_s": 1.0, "drain_s": 2.0}

#: Requests that repeat: each is first run alone, for what it must say.
KINDS: tuple[dict[str, Any], ...] = ({"temperature": 0}, {"temperature": 0.9, "seed": 7}, {"temperature": 0})


class FlipRow(msgspec.Struct, frozen=True, kw_only=True):
    """One call. Times in seconds."""

    flips: int
    streams: int
    failed: int
    differing: int
    moved: int
    not_moved: int
    took_s: list[float]
    blocks_left: int


class FlipLoad:
    """Streams that run all the time.

    Attributes:
        streams, failed, differing: Counts of those that ended.
    """

    def __init__(self, rig: UpRig, http: httpx.AsyncClient, *, tokens: int, prompts: int, seed: int) -> None:
        self._rig, self._http, self._tokens, self._prompts = rig, http, tokens, prompts
        self._rng = Random(seed)
        self._expected: dict[int, tuple[str, str, int]] = {}
        self.streams = self.failed = self.differing = 0
        self.errors: Counter[str] = Counter()

    def _fields(self, number: int) -> dict[str, Any]:
        kind = KINDS[number % len(KINDS)]
        return {"prompt": prompt_text(number), "max_tokens": self._tokens, "ignore_eos": True, **kind}

    async def learn(self) -> None:
        """Records what each request says while nothing moves."""
        numbers = range(self._prompts)
        told = await asyncio.gather(*(play(self._http, self._rig, TimedStream(), **self._fields(n)) for n in numbers))
        for number, stream in zip(numbers, told, strict=True):
            assert not stream.error, stream.error
            self._expected[number] = stream.outcome

    async def run(self, done: asyncio.Event) -> None:
        """One stream after the other."""
        while not done.is_set():
            number = self._rng.randrange(self._prompts)
            stream = await play(self._http, self._rig, TimedStream(), **self._fields(number))
            self.streams += 1
            self.failed += bool(stream.error)
            if stream.error:
                self.errors[stream.error] += 1
            self.differing += stream.outcome != self._expected[number]


async def measure(rig: UpRig, *, flips: int, limit_s: float, streams: int, tokens: int, seed: int) -> FlipRow:
    """Flips under load for so long, or so often."""
    async with client() as http, RoleOperator(rig) as operator:
        load = FlipLoad(rig, http, tokens=tokens, prompts=12, seed=seed)
        await load.learn()
        moves: Counter[bool] = Counter()
        await operator.watch_moves(lambda body: _count(moves, body))
        done = asyncio.Event()
        players = [asyncio.create_task(load.run(done)) for _ in range(streams)]
        began = time.monotonic()
        for instance, role in cycle(ORDERS):
            if len(operator.took_s) >= flips or time.monotonic() - began > limit_s:
                break
            await operator.flip(instance, role)
        done.set()
        await asyncio.gather(*players)
        for instance in ("worker-0", "worker-1"):
            await operator.flip(instance, BOTH)
            operator.took_s.pop()
    for error, count in load.errors.items():
        print(f"  {count} x {error}")
    return FlipRow(
        flips=len(operator.took_s),
        streams=load.streams,
        failed=load.failed,
        differing=load.differing,
        moved=moves[True],
        not_moved=moves[False],
        took_s=[round(took_s, 2) for took_s in operator.took_s],
        blocks_left=await _blocks_left(rig),
    )


def _count(moves: Counter[bool], body: MigrationFinished) -> None:
    moves[body.outcome is MigrationOutcome.MOVED] += 1


async def _blocks_left(rig: UpRig) -> int:
    """Blocks that are not free although nothing runs."""
    await asyncio.sleep(3)  # leases and reservations have run out
    return (await rig.totals()).blocks_used


def options_of(engine: str) -> list[str]:
    """Options of `millrace up` for two instances whose roles flip often."""
    fences = json.dumps({"flips": FENCES})
    options = ["--policy", "round_robin", "--set", "telemetry.trace_sample=0", "--set", "coordinator=" + fences]
    return [*options, *(["--processes", "2"] if engine == "modelled" else [])]
