"""Cost of the autopilot's replays: blocks of load on two real vLLM engines, every second one beside replays.

A replay is what the autopilot starts, at the same priority, and in its blocks one follows the other: the autopilot
itself takes 5 % of a core on average, so that its cost is a twentieth of this and less. ``--share-s`` measures that
average in place of it, by the kernel's count of the coordinator's children.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import psutil
from millrace.actor.child_process import run_python

from bench.live.play import Played, play
from bench.results_pages import report
from bench.what_if import WARM_UP, load
from services.coordinator.shell import NICENESS_MAX
from tests.testbed.up_cluster import UpRig


def main() -> int:
    """Runs and prints."""
    parser = argparse.ArgumentParser(prog="python -m bench autopilot", description=__doc__)
    parser.add_argument("--pairs", type=int, default=3, help="of blocks (default %(default)s)")
    parser.add_argument("--count", type=int, default=80, help="requests of a block (default %(default)s)")
    parser.add_argument("--rate", type=float, default=2.5, help="requests/s (default %(default)s)")
    parser.add_argument("--engine", default="vllm", help="or modelled, to try the bench")
    parser.add_argument("--share-s", type=float, default=0.0, help="measure its share of a core for so long")
    parser.add_argument("--interval-s", type=float, default=300.0, help="from one of its replays to the next at least")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path("models/millrace-mini")
        words = ("--set", "telemetry.trace_sample=0", "--set", f"coordinator.autopilot_interval_s={options.interval_s}")
        with UpRig(Path(folder), model_path=model, engine=options.engine, instances=2, extra=words) as rig:
            asyncio.run(_measure_share(rig, options) if options.share_s else _measure(rig, options))
    return 0


async def _measure_share(rig: UpRig, options: argparse.Namespace) -> None:
    """From the first replay's begin to the last one's, which is its end less its CPU: each has its own pause."""
    requests = load(options.rate, round(options.rate * options.share_s), 0)
    work = asyncio.create_task(play(requests, port=rig.port, model=rig.model))
    coordinator, ends = psutil.Process(rig.pids("coordinator-0.json")[0]), [(0.0, 0.0)]
    while not work.done():
        cpu_s = sum(coordinator.cpu_times()[2:4])  # of children that have ended
        if cpu_s > ends[-1][1]:
            ends.append((time.monotonic(), cpu_s))
        await asyncio.sleep(1)
    assert len(ends) > 2, f"{len(ends) - 1} replays: measure for longer"
    (first_s, first), (_, took), (last_s, most) = ends[1], ends[-2], ends[-1]
    spent_s = last_s - first_s - (most - took) + first
    share = f"{took / spent_s:.1%}"
    print(f"{len(ends) - 2} replays in {spent_s:.0f} s took {took:.1f} s of CPU: {share} of a core")
    report("share", share)


async def _measure(rig: UpRig, options: argparse.Namespace) -> None:
    warm = [msgspec.structs.replace(each, at_s=0.5 * n) for n, each in enumerate(load(1.0, 5 * WARM_UP, 999))]
    await play(warm, port=rig.port, model=rig.model)
    alone: list[Played] = []
    beside: list[Played] = []
    cpu_s = [0.0, 0.0]
    for pair in range(options.pairs):
        requests = load(options.rate, options.count, pair)
        for replays in ((0, 1), (1, 0))[pair % 2]:
            # Other prompts of the same lengths: none is in a prefix cache.
            own = [msgspec.structs.replace(each, prompt=f"{pair} {replays} {each.prompt}") for each in requests]
            async with _replays(rig) if replays else contextlib.nullcontext():
                before = _cluster_cpu_s(rig)
                played = await play(own, port=rig.port, model=rig.model)
                (alone, beside)[replays].extend(played)
                cpu_s[replays] += _cluster_cpu_s(rig) - before
    requests_all = options.pairs * options.count
    print(f"{requests_all} requests each way at {options.rate:g}/s, load average {os.getloadavg()[0]:.1f}")
    print(f"{'':<16}{'TTFT p50':>10}{'p99':>8}{'e2e p50':>10}{'p99':>8}{'failed':>8}{'cluster CPU ms a request':>26}")
    for name, played, cpu in (("alone", alone, cpu_s[0]), ("beside replays", beside, cpu_s[1])):
        ttft, e2e = ([getattr(each, key) for each in played if not each.error] for key in ("ttft_s", "e2e_s"))
        cells = [1e3 * float(np.quantile(values, share)) for values in (ttft, e2e) for share in (0.5, 0.99)]
        told = f"{cells[0]:>10.0f}{cells[1]:>8.0f}{cells[2]:>10.0f}{cells[3]:>8.0f}"
        print(f"{name:<16}{told}{sum(bool(each.error) for each in played):>8}{1e3 * cpu / requests_all:>26.1f}")
    pairs = [(a, b) for a, b in zip(alone, beside, strict=True) if not (a.error or b.error)]
    for key in ("ttft_s", "e2e_s"):
        ratio = sum(getattr(b, key) for _, b in pairs) / sum(getattr(a, key) for a, _ in pairs)
        print(f"mean {key[:-2]} of requests of the same lengths beside replays: {100 * (ratio - 1):+.1f} %")
        report(f"{key[:-2]}", f"{100 * (ratio - 1):+.1f} %")


@contextlib.asynccontextmanager
async def _replays(rig: UpRig) -> AsyncIterator[None]:
    async def one_after_the_other() -> None:
        while True:
            words = ("what-if", "--advise", "--dir", str(rig.folder), "--most", "1000", "--jobs", "1")
            await run_python("millrace.cli", *words, niceness=NICENESS_MAX)

    work = asyncio.create_task(one_after_the_other())
    try:
        yield
    finally:
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work


def _cluster_cpu_s(rig: UpRig) -> float:
    """Processor time of every process of the cluster so far."""
    return sum(sum(process.cpu_times()[:2]) for process in rig.processes() if process.is_running())


if __name__ == "__main__":
    raise SystemExit(main())
