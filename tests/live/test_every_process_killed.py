"""Everything on, and no process alone: every one is killed in turn under load. What runs at a killed ingress breaks and
is asked again; nothing else is noticed.

`./task test:soak` (MILLRACE_SOAK_MINUTES) goes on with a kill each minute, prints a line for each, and memory and file
descriptors stay flat.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from contextlib import nullcontext, suppress
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.live.faults import PROMPTS, expect_identical, kill, told, undisturbed
from tests.live.ingress_rig import write_model_folder
from tests.testbed.timed_streams import TimedStream, client
from tests.testbed.up_cluster import UpRig, free_port, prompt_text, stream
from tests.testbed.waiting import until

MINUTES = float(os.environ.get("MILLRACE_SOAK_MINUTES", "0"))
LENGTH = {"max_tokens": 60, "ignore_eos": True}
WORKER = {"max_num_seqs": 16, "kv_blocks": 2048, "modelled": {"speed": 0.1}}
SETTINGS = (
    "nats.servers=3",
    "services.ingresses=2",
    "services.coordinators=2",
    "services.predictors=2",
    "services.hosted_instances_max=0",
    "telemetry.trace_sample=1.0",
    "ingress.dispatch.wait_s=60",  # all of NATS is away for longer than ten seconds on a full machine
    "worker=" + json.dumps(WORKER),
)
ON = ("--processes", "3", "--kv-replicas", "--trading", "delay")
INGRESSES, NATS = ("ingress-0", "ingress-1"), ("nats-0", "nats-1", "nats-2")
RATE = 2.0
#: Tokens of a response that takes longer than servers to come back.
MADE = 400

#: Growth of a process from the first third of a long run to the last: what allocators keep, and requests that are open.
GROWN_BYTES, GROWN_FILES = 24 << 20, 40


class Watch:
    """Memory and file descriptors of every process of a cluster, look by look."""

    def __init__(self, rig: UpRig) -> None:
        self.rig = rig
        self.seen: dict[psutil.Process, list[tuple[int, int]]] = {}

    def look(self) -> tuple[int, int]:
        """Notes each process; returns the sums."""
        assert self.rig.process is not None
        for process in [psutil.Process(self.rig.process.pid), *self.rig.processes()]:
            try:
                self.seen.setdefault(process, []).append((process.memory_info().rss, process.num_fds()))
            except psutil.Error:
                continue
        last = [looks[-1] for process, looks in self.seen.items() if process.is_running()]
        return sum(rss for rss, _ in last), sum(files for _, files in last)

    def grown(self) -> list[tuple[str, int, int]]:
        """(name, bytes, files) of those that grew, of processes that were seen for half an hour at least."""
        found = []
        for process, looks in self.seen.items():
            third = len(looks) // 3
            if third < 10 or not process.is_running():
                continue
            more = [int(median(n[i] for n in looks[-third:]) - median(n[i] for n in looks[:third])) for i in (0, 1)]
            if more[0] > GROWN_BYTES or more[1] > GROWN_FILES:
                found.append((process.name(), *more))
        return found


def names(rig: UpRig) -> list[str]:
    """Every process of the cluster, as its configuration file is called."""
    found = {re.search(r"run/([a-z]+-\d+)\.(json|conf)", " ".join(process.cmdline())) for process in rig.processes()}
    return sorted({match[1] for match in found if match})


async def killed(rig: UpRig, *victims: str, torn: bool = False) -> None:
    """Kills them at once and waits until they are back. ``torn``: their files are as an unsynced disk leaves them."""
    before = {name: rig.pids(f"/{name}.") for name in victims}
    often = {name: rig.output().count(f"{name} ready") for name in victims}
    for name, pids in before.items():
        kill(pids[0])
        for file in (rig.folder / "jetstream" / name).resolve().rglob("*") if torn else ():
            if file.is_file():
                os.truncate(file, file.stat().st_size // 2)
    await until(lambda: all(rig.output().count(f"{name} ready") > often[name] for name in victims), look_s=0.05)
    await told(rig, instances_ready=3)
    assert not [name for name in victims if rig.pids(f"/{name}.") == before[name]]


async def killed_in_turn(rig: UpRig, victims: list[str]) -> None:
    for name in victims:
        await killed(rig, name)


async def killed_for_long(rig: UpRig, victims: list[str], watch: Watch) -> None:
    began = time.monotonic()
    for name in cycle(victims):
        if (took := time.monotonic() - began) > MINUTES * 60:
            return
        rss, files = await asyncio.to_thread(watch.look)
        print(f"{took:6.0f} s  {name:<14}{rss >> 20:6} MiB {files:5} files", flush=True)
        await asyncio.sleep(60)
        await killed(rig, name)


async def answered(http: httpx.AsyncClient, rig: UpRig, number: int, broken: list[str]) -> TimedStream:
    """As a client that asks again where its connection broke."""
    while True:
        result = await stream(http, rig, prompt_text(number), **LENGTH)
        if not re.match(r"[A-Z]\w+Error: ", result.error):
            return result
        broken.append(result.error)


async def offered(rig: UpRig, work: Any) -> tuple[list[tuple[int, TimedStream]], list[str]]:
    """Streams until the work is done; also what broke a connection."""
    broken = list[str]()
    async with client(120) as http:
        doing, tasks = asyncio.create_task(work), []
        while not doing.done():
            number = len(tasks) % PROMPTS
            tasks.append((number, asyncio.create_task(answered(http, rig, number, broken))))
            await asyncio.wait([doing], timeout=1 / RATE)
        results = [(number, await task) for number, task in tasks]
        await doing
        return results, broken


async def stored_across(rig: UpRig, *servers: str, torn: bool) -> tuple[list[tuple[int, TimedStream]], list[str]]:
    """Kills servers under load. What was told to be stored is found, but for what had ended where all lost their files
    (``torn``); a response that is being made in the background ends well, and its stream goes on.
    """
    ask: dict[str, Any] = {"model": "m", "input": "a b", "extra_body": {"ignore_eos": True}}
    async with openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        kept = [await client.responses.create(**ask, max_output_tokens=2)]
        made = await client.responses.create(**ask, max_output_tokens=MADE, background=True, stream=True)
        events = list[Any]()

        async def read() -> None:
            with suppress(openai.APIError) if torn else nullcontext():  # events may be lost that nobody had read
                async for event in made:
                    events.append(event)

        async def ended() -> Any:
            with suppress(openai.NotFoundError):  # until its ingress stores it again
                found = await client.responses.retrieve(events[0].response.id)
                return found.status == "incomplete" and found

        doing = asyncio.create_task(offered(rig, killed(rig, *servers, torn=torn)))
        reading = asyncio.create_task(read())
        while not doing.done():
            with suppress(openai.InternalServerError):  # so it is not stored
                for late in (False, True):
                    kept.append(await client.responses.create(**ask, max_output_tokens=2, background=late))
            await asyncio.wait([doing], timeout=1)
        await reading
        assert [event.sequence_number for event in events] == list(range(len(events)))
        found = await until(ended, look_s=0.1)
        assert found.usage.output_tokens == MADE
        assert torn or events[-1].response == found
        for each in (each for each in kept if each.store):
            with suppress(openai.NotFoundError) if torn else nullcontext():
                assert await client.responses.retrieve(each.id)
        return await doing


@pytest.mark.timeout(MINUTES * 60 + 600)
async def test_any_one_process_may_be_killed_and_only_connections_of_a_killed_ingress_break(tmp_path: Path) -> None:
    model = write_model_folder(tmp_path / "model")
    settings = (*SETTINGS, f"page.port={free_port()}")
    options = [*ON, *(word for setting in settings for word in ("--set", setting))]
    with UpRig(tmp_path / "cluster", model_path=model, engine="modelled", instances=3, extra=options) as rig:
        expected, watch = await undisturbed(rig, **LENGTH), Watch(rig)
        every = names(rig)
        kinds = [name.rpartition("-")[0] for name in every]
        once = {"tagger": 1}
        for kind in ("nats", "coordinator", "predictor", "worker", "migrator", "ingress", "tagger"):
            assert kinds.count(kind) >= once.get(kind, 2), every
        others = [name for name in every if name not in INGRESSES]
        results, broken = await offered(rig, killed_in_turn(rig, [name for name in others if name not in NATS]))
        expect_identical(results, expected)
        assert not broken
        expect_identical((await offered(rig, killed_in_turn(rig, list(INGRESSES))))[0], expected)
        for servers in (*((one,) for one in NATS), NATS[:2], NATS):  # the majority at once; a power cut
            results, broken = await stored_across(rig, *servers, torn=servers == NATS)
            expect_identical(results, expected)
            assert not broken
        for _ in range(3):  # the plan may change once more after the last server came back: the command then says so
            said = await asyncio.to_thread(rig.cli, "role", "worker-2", "decode")
            if "refused (old_plan)" not in said:
                break
        assert "worker-2 does decode" in said, said
        if MINUTES:
            expect_identical((await offered(rig, killed_for_long(rig, others, watch)))[0], expected)
        await told(rig, instances_ready=3, running=0, waiting=0, blocks_used=0)
        assert watch.grown() == []
