"""Single migrations step by step: where the time between the source's last token and the target's first one goes.

Two real engines under `millrace up` whose schedulers note each step (`bench/migration/watched_engine.py`); a subscriber
on the bus notes when each message passes; the stream's client notes its events. Other streams run in a process of their
own, so that the watched one does not wait for them to be read. All times are one machine's monotonic clock.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random

import httpx
import psutil

from bench.migration.long_context import stretched
from bench.migration.others import OthersApart
from bench.migration.separate_cores import separate
from bench.migration.watching import FOLDER, POINTS, Heard, Watch, noted, read
from bench.migration_gap import SETTLE_TOKENS
from tests.testbed.migration_operator import Operator
from tests.testbed.timed_streams import TimedStream, client, play, prompt_ids
from tests.testbed.up_cluster import UpRig

#: The target's steps that are shown one by one, counted from its first.
SHOWN_STEPS = (0, 1, 2, 4, 9, 19, 39)


class Rigged:
    """Resources that every migration needs."""

    def __init__(self, rig: UpRig, http: httpx.AsyncClient, operator: Operator, folder: Path) -> None:
        self.heard = Heard()
        self.waited = 0.0
        self._rig, self._http, self._operator, self._folder = rig, http, operator, folder

    async def move_one(self, prompt: list[int], mode: str) -> Watch | None:
        """Moves one stream in its middle and reads what everybody noted."""
        self.heard.tokens.clear()
        gc.collect()  # now, and not while the stream is read
        gc.freeze()
        waits = waited(os.getpid())
        stream = TimedStream(settle=SETTLE_TOKENS)
        fields = {"prompt": prompt, "max_tokens": 4 * SETTLE_TOKENS, "ignore_eos": True}
        task = asyncio.create_task(play(self._http, self._rig, stream, **fields))
        await stream.settled.wait()
        target = self._operator.other(stream.sequence)
        finished = await self._operator.migrate(stream.sequence, target, mode)
        await task
        self.waited = waited(os.getpid()) - waits
        if finished is None or str(finished.outcome) != "moved":
            print(f"  not moved: {stream.error or finished}")
            return None
        return read(stream, self.heard, finished.migration, target, noted(self._folder))


def table(watches: list[Watch]) -> str:
    """Medians of the stages, the target's steps, and the gap."""
    lines = []
    for index, (point, what) in enumerate(POINTS[1:]):
        found = [stage for watch in watches if (stage := watch.stages()[index]) is not None]
        if found:
            lines.append(f"    {_spread(found)}  {point:29} {what}")
    for number in SHOWN_STEPS:
        steps = [watch.steps[number] for watch in watches if len(watch.steps) > number]
        if steps:
            parts = [statistics.median(part) for part in zip(*steps, strict=True)]
            text = (
                "{:5.1f}, scheduling {:.1f}, model {:.1f}; on core {:.1f}; {:.0f} page faults, displaced {:.0f} times"
            )
            lines.append(f"    step {number + 1:2} at B: {text.format(*parts)}")
    out, on = (statistics.median(watch.ways[way] for watch in watches) for way in (0, 1))
    lines.append(f"    a usual token of A: {out:.1f} from its step's end to the bus, {on:.1f} from there to the client")
    usual = statistics.median(watch.usual for watch in watches)
    lines.append(f"    gap {_spread([watch.gap for watch in watches])}, usual {usual:.1f}")
    return "\n".join(lines)


def _spread(found: list[float]) -> str:
    return f"{statistics.median(found):7.1f} ({min(found):6.1f} to {max(found):6.1f})"


def one_line(watch: Watch) -> str:
    """One migration."""
    told = " ".join("-" if stage is None else f"{stage:.1f}" for stage in watch.stages())
    first = "first step of {} sequences, {} tokens, {} waiting".format(*watch.first)
    first += f", {watch.without} without it"
    first += f", {watch.silent} tokens without event" if watch.silent else ""
    widest = f"widest {watch.widest[0]:.1f} {watch.widest[1]:+d} events from it ({watch.pause:.0f} on the bus, "
    widest += f"{watch.slowest[1]} tokens in a step of {watch.slowest[0]:.0f})"
    return f"      gap {watch.gap:.1f}, usual {watch.usual:.1f}, {widest}: {told}; {first}"


class Awake:
    """Keeps every core from falling asleep, by processes that run only where nobody else wants to; while it is on."""

    def __init__(self, wanted: bool) -> None:
        self._spinners = []
        for _ in range(os.cpu_count() or 1) if wanted else ():
            spinner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            os.sched_setscheduler(spinner.pid, os.SCHED_IDLE, os.sched_param(0))
            self._spinners.append(spinner)

    def turn(self, on: bool) -> None:
        """On or off."""
        for spinner in self._spinners:
            spinner.send_signal(signal.SIGCONT if on else signal.SIGSTOP)

    def end(self) -> None:
        """Ends them."""
        for spinner in self._spinners:
            spinner.kill()


def waited(pid: int) -> float:
    """Seconds that a process' main thread has waited for a core so far."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


class Shares:
    """Share of a core that each process takes, and share of the time that its main thread waits for one."""

    def __init__(self, rig: UpRig) -> None:
        processes = [*rig.processes(), psutil.Process(), *psutil.Process().children(recursive=True)]
        self._before = {process: (process.cpu_times(), waited(process.pid)) for process in processes}
        self._began = time.monotonic()

    def text(self) -> str:
        """One line."""
        took, found = time.monotonic() - self._began, []
        for process, (before, waits) in self._before.items():
            try:
                now, words, nice = process.cpu_times(), " ".join(process.cmdline()).split(), process.nice()
                waits = waited(process.pid) - waits
            except (psutil.Error, OSError):
                continue
            share = (now.user + now.system - before.user - before.system) / took
            name = next((word for word in words if word.startswith(("services.", "VLLM"))), Path(words[0]).name)
            found.append((share, f"{name} {share:.2f} (waits {waits / took:.2f}, nice {nice})"))
        return ", ".join(text for share, text in sorted(found, reverse=True) if share > 0.01)


async def measure(rig: UpRig, options: argparse.Namespace, folder: Path, keeping: Awake) -> None:
    """Every load and context."""
    async with client() as http, Operator(rig) as operator:
        rigged, rng = Rigged(rig, http, operator, folder), Random(options.seed)
        await operator.know(2)
        await rigged.heard.listen(operator)
        for load in options.loads:
            others = OthersApart(rig, count=2 * load, seed=options.seed)
            await others.begin()
            shares = Shares(rig)
            for context in options.contexts:
                found: dict[bool, list[Watch]] = {}
                for number in range(options.moves):
                    on = options.awake and number % 2 == 1
                    keeping.turn(on)
                    watch = await rigged.move_one(prompt_ids(rng, context), options.mode)
                    found.setdefault(on, []).extend([watch] if watch else [])
                    if options.each:
                        print(f"      the client waited {rigged.waited * 1e3:.0f} ms for a core")
                for on, moved in found.items():
                    awakened = ", cores kept awake" if on else ""
                    print(f"  {context} tokens, {load} others per engine, {len(moved)} moves, {options.mode}{awakened}")
                    if moved:
                        print(table(moved), flush=True)
                    for watch in moved if options.each else ():
                        print(one_line(watch), flush=True)
            print(f"    cores: {shares.text()}", flush=True)
            await others.stop()


def main() -> int:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="millrace-micro")
    parser.add_argument("--contexts", type=int, nargs="+", default=[256])
    parser.add_argument("--loads", type=int, nargs="+", default=[0, 62], help="other streams per engine")
    parser.add_argument("--mode", default="live")
    parser.add_argument("--moves", type=int, default=8, help="migrations per table")
    parser.add_argument("--each", action="store_true", help="one line for every migration too")
    parser.add_argument("--awake", action="store_true", help="keep cores from sleeping in every other move")
    parser.add_argument("--separate-cores", action="store_true", help="as of migration_gap")
    parser.add_argument("--worker-set", default="{}", metavar="JSON", help="further fields of each worker")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER] = folder
        model = stretched(options.model, Path(folder), tokens=max(options.contexts) + 4096)
        watched = {"engine_args": {"scheduler_cls": "bench.migration.watched_engine.WatchedScheduler"}}
        settings = json.dumps(watched | json.loads(options.worker_set))
        extra = ["--policy", "join_shortest_queue", "--set", "telemetry.trace_sample=0", "--set", "worker=" + settings]
        rig = UpRig(Path(folder) / "cluster", model_path=model, engine="vllm", instances=2, extra=extra)
        rig.start()
        keeping = Awake(options.awake)
        try:
            print(f"{options.model}, two engines, seed {options.seed}; ms, median (least to most)")
            if options.separate_cores:
                print(f"{separate(rig)} engine processes on a core of their own")
            asyncio.run(measure(rig, options, Path(folder), keeping))
        finally:
            keeping.end()
            rig.stop()
    return 0
