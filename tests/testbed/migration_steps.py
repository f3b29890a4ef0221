"""Acts at each step of a migration in a cluster of two instances, real engines or modelled ones."""

import asyncio
import os
import signal
import time
from collections.abc import Callable

import httpx
import pytest
from millrace.actor.nats_client import end_task

from tests.testbed.migration_operator import Operator
from tests.testbed.timed_streams import TimedStream, client, play
from tests.testbed.up_cluster import UpRig, prompt_text
from tests.testbed.waiting import until

STREAMS = 4
LENGTH = {"max_tokens": 320, "ignore_eos": True}
#: Streams may end before their migration came to the step in question; others are tried, so often.
ATTEMPTS = 5
#: Leases, freezes and reservations have run out by then, seconds.
SETTLED_S = 20.0

ASK, BID, AWARD, LEASE = "ask.*.*", "bid.*.*", "migrate.*.move", "engine.*.lease"
PREPARE, FREEZE, SUBMIT, END = "engine.*.prepare", "engine.*.freeze", "engine.*.submit", "engine.*.end"
SOURCE, TARGET, SOURCE_MIGRATOR, TARGET_MIGRATOR, NATS = "source", "target", "its migrator", "target's migrator", "nats"


def start_stream(http: httpx.AsyncClient, rig: UpRig, number: int) -> tuple[TimedStream, asyncio.Task[TimedStream]]:
    stream = TimedStream(settle=30)
    fields = {"prompt": 4 * prompt_text(number), **LENGTH}
    return stream, asyncio.create_task(play(http, rig, stream, **fields))


async def undisturbed(rig: UpRig) -> dict[int, str]:
    """Text of each stream where nothing moves."""
    async with client() as http:
        streams = await asyncio.gather(*(start_stream(http, rig, number)[1] for number in range(STREAMS)))
    assert not [stream.error for stream in streams if stream.error]
    return {number: stream.text for number, stream in enumerate(streams)}


def _pid(rig: UpRig, victim: str, source: str, target: str) -> int:
    migrators = {name: rig.pids(f"migrator-{name.rpartition('-')[2]}.json")[0] for name in (source, target)}
    return {
        SOURCE: lambda: rig.log_pids(source)[0],
        TARGET: lambda: rig.log_pids(target)[0],
        SOURCE_MIGRATOR: lambda: migrators[source],
        TARGET_MIGRATOR: lambda: migrators[target],
        NATS: lambda: rig.pids("nats-server")[0],
    }[victim]()


async def whole_again(rig: UpRig) -> None:
    """Every process is there, every instance is ready and every block is free."""
    await until(lambda: all(rig.pids(f"migrator-{number}.json") for number in (0, 1)), look_s=0.1)
    await rig.well(2)
    deadline = time.monotonic() + SETTLED_S
    async with Operator(rig) as operator:
        await operator.know(2)
        while any(s.blocks_free != s.blocks_total or s.running or s.waiting for s in operator.snapshots.values()):
            assert time.monotonic() < deadline, operator.snapshots
            await asyncio.sleep(0.1)


async def migrate_under(
    rig: UpRig, http: httpx.AsyncClient, expected: dict[int, str], step: str, act: Callable[[str, str], None]
) -> None:
    """Moves a running stream; ``act`` on (source, target) at the first message of a step. Every text must be whole.

    Where the streams ended before the migration came so far (a busy machine: somebody was late), others are moved.
    """
    told: list[str] = []
    for _ in range(ATTEMPTS):
        if await _acted_under(rig, http, expected, step, act, told):
            return
    pytest.fail(f"no message on {step}: the migration never came so far: {told}")


async def _acted_under(
    rig: UpRig,
    http: httpx.AsyncClient,
    expected: dict[int, str],
    step: str,
    act: Callable[[str, str], None],
    told: list[str],
) -> bool:
    began = [start_stream(http, rig, number) for number in range(STREAMS)]
    acted: list[float] = []
    async with Operator(rig) as operator:
        await operator.know(2)
        await asyncio.gather(*(stream.settled.wait() for stream, _ in began))
        running = [(s.sequence, task) for s, task in began if s.sequence in operator.where and not task.done()]
        if running:
            sequence, task = running[-1]
            source, target = operator.where[sequence], operator.other(sequence)

            def once() -> None:
                acted.append(time.monotonic())
                act(source, target)

            await operator.at(step, once)
            while not acted and not task.done():
                asking = asyncio.create_task(operator.migrate(sequence, target))
                # Who was killed answers nobody: the stream's end tells that it will not.
                await asyncio.wait([asking, task], return_when=asyncio.FIRST_COMPLETED)
                finished = asking.result() if asking.done() else None
                await end_task(asking)
                if finished is None:
                    await asyncio.sleep(0.05)
                told.append(
                    "unanswered" if finished is None else f"{finished.outcome} {finished.refusal} {finished.detail}"
                )
        streams = await asyncio.gather(*(task for _, task in began))
    assert not [stream.error for stream in streams if stream.error]
    assert {number: stream.text for number, stream in enumerate(streams)} == expected
    return bool(acted)


async def kill_at(rig: UpRig, expected: dict[int, str], victim: str, step: str) -> None:
    """Kill -9 at a step of a migration; every text must be whole and every block free."""

    def shoot(source: str, target: str) -> None:
        os.kill(pids[source], signal.SIGKILL)

    # Whichever of the two it will be: looking for a process takes longer than a step.
    pids = {
        source: _pid(rig, victim, source, target)
        for source, target in (("worker-0", "worker-1"), ("worker-1", "worker-0"))
    }
    async with client() as http:
        await migrate_under(rig, http, expected, step, shoot)
    await whole_again(rig)
