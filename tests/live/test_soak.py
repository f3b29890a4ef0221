"""Everything on, a kill each minute: no stream is lost or differs, memory and file descriptors stay flat.

MILLRACE_SOAK_MINUTES=120 runs it for two hours and prints a line a minute; by itself it takes half a minute.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from statistics import median

import psutil
import pytest

from tests.live.faults import PROMPTS, expect_identical, undisturbed
from tests.live.ingress_rig import write_model_folder
from tests.testbed.up_cluster import UpRig, free_port, offer_during

MINUTES = float(os.environ.get("MILLRACE_SOAK_MINUTES", "0.5"))
EVERY_S = min(60.0, MINUTES * 60 / 8)
RATE = 4.0
FIELDS = {"max_tokens": 120, "ignore_eos": True}

ON = (
    *("--processes", "3", "--kv-replicas", "--trading", "delay", "--set", "nats.servers=3"),
    *("--set", "telemetry.trace_sample=1.0"),
)

#: Ingress is none of them: its own connections end with it.
VICTIMS = ("worker-0", "nats-1", "coordinator-0", "worker-1", "migrator-0", "page", "nats-0", "worker-2", "nats-2")

#: Growth of a process from the first third of a long run to the last: what allocators keep, and requests that are open.
GROWN_BYTES, GROWN_FILES = 24 << 20, 40


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[UpRig]:
    model = write_model_folder(tmp_path / "model")
    page = ("--set", f"page.port={free_port()}")
    with UpRig(tmp_path / "c", model_path=model, engine="modelled", instances=3, extra=(*ON, *page)) as made:
        yield made


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


@pytest.mark.timeout(MINUTES * 60 + 600)
async def test_with_everything_on_and_a_kill_each_minute_nothing_is_lost_and_nothing_grows(rig: UpRig) -> None:
    expected, watch = await undisturbed(rig, **FIELDS), Watch(rig)
    until, began = time.monotonic() + MINUTES * 60, time.monotonic()

    async def kills() -> None:
        for victim in cycle(VICTIMS):
            if time.monotonic() > until:
                return
            await asyncio.sleep(EVERY_S)
            os.kill(rig.log_pids(victim)[0], signal.SIGKILL)
            await rig.well(3)
            rss, files = await asyncio.to_thread(watch.look)
            print(f"{time.monotonic() - began:6.0f} s  {victim:<14}{rss >> 20:6} MiB {files:5} files", flush=True)

    results = await offer_during(rig, kills(), rate=RATE, prompts=PROMPTS, **FIELDS)
    print(f"{len(results)} streams, {sum(bool(each.error) for _, each in results)} failed")
    expect_identical(results, expected)
    assert watch.grown() == []
