"""Time that a client waits when its request moves between real engines, by context, load and mode.

Two engines under `millrace up`, streams over HTTP. For each context length and load, streams with prompts of their own
are moved once each, by a request on NATS, in each mode in turn. The *gap* is the longest interval between two events of
the stream of which any part lies between the request and 50 ms after its answer; the usual interval of the same stream
stands beside it. The *others* run all the time on both engines: their intervals inside migrations are compared with
those outside.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import httpx
import numpy as np

from bench.migration.long_context import stretched
from bench.migration.others import OthersApart
from bench.migration.separate_cores import separate
from tests.testbed.migration_operator import Operator
from tests.testbed.timed_streams import TimedStream, client, play, prompt_ids
from tests.testbed.up_cluster import UpRig

MODES = ("live", "stop_and_copy", "recompute")
#: Output tokens before a stream is moved, and at least as many after it.
SETTLE_TOKENS = 24
#: The answer comes when the target owns it; the target's first token follows within this time, seconds.
AFTER_S = 0.05


@dataclass(slots=True)
class Cell:
    """Results of one (context, load, mode). Seconds."""

    gaps: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    frozen: list[float] = field(default_factory=list)
    usual: list[float] = field(default_factory=list)
    windows: list[tuple[float, float]] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    rounds: list[int] = field(default_factory=list)


async def move_one(
    rig: UpRig, http: httpx.AsyncClient, operator: Operator, cell: Cell, *, prompt: list[int], mode: str
) -> None:
    """Starts a stream, moves it in its middle, notes its gap."""
    stream = TimedStream(settle=SETTLE_TOKENS)
    task = asyncio.create_task(play(http, rig, stream, prompt=prompt, max_tokens=4 * SETTLE_TOKENS, ignore_eos=True))
    await stream.settled.wait()
    asked = time.monotonic()
    finished = await operator.migrate(stream.sequence, operator.other(stream.sequence), mode)
    answered = time.monotonic()
    await task
    outcome = stream.error or (str(finished.outcome) if finished else "unanswered")
    cell.outcomes[outcome] += 1
    if finished is None or outcome != "moved":
        return
    intervals = stream.intervals(asked, answered + AFTER_S)
    usual = [*stream.intervals(0, asked), *stream.intervals(answered + AFTER_S, 1e12)]
    if intervals and usual:
        cell.gaps.append(max(intervals))
        cell.beside.append(max(stream.intervals(asked - (answered + AFTER_S - asked), asked), default=float("nan")))
        cell.usual.append(statistics.median(usual))
        cell.frozen.append(finished.cost.frozen_ns / 1e9)
        cell.rounds.append(finished.cost.rounds)
        cell.windows.append((asked, answered))


async def measure(rig: UpRig, options: argparse.Namespace, say: Callable[[str], None]) -> bool:
    """Every cell; prints a line each. False where anything failed."""
    rng, good = Random(options.seed), True
    async with client() as http, Operator(rig) as operator:
        await operator.know(2)
        for load in options.loads:
            others = OthersApart(rig, count=2 * load, seed=options.seed)
            await others.begin()
            for context in options.contexts:
                cells = {mode: Cell() for mode in options.modes}
                for _ in range(options.moves):
                    for mode, cell in cells.items():
                        await move_one(rig, http, operator, cell, prompt=prompt_ids(rng, context), mode=mode)
                for mode, cell in cells.items():
                    say(line(context, load, mode, cell, await slower(cell, others)))
                    good &= not set(cell.outcomes) - {"moved"}
            await others.stop()
            await asyncio.sleep(0.5)
    return good


async def slower(cell: Cell, others: OthersApart) -> str:
    """By how much the others' intervals were longer during migrations."""
    if not cell.windows:
        return ""
    inside, outside = [await others.intervals(cell.windows, within=within) for within in (True, False)]
    return f"{100 * (np.mean(inside) / np.mean(outside) - 1):+5.1f} %" if inside and outside else ""


def line(context: int, load: int, mode: str, cell: Cell, slow: str) -> str:
    """One row."""
    gaps, frozen = _quantiles(cell.gaps), _quantiles(cell.frozen)
    beside = [value for value in cell.beside if value == value]
    usual = statistics.median(cell.usual) * 1000 if cell.usual else float("nan")
    outcomes = ", ".join(f"{count} {name}" for name, count in sorted(cell.outcomes.items()))
    rounds = statistics.mean(cell.rounds) if cell.rounds else float("nan")
    return (
        f"  {context:7} {load:6}  {mode:14} {gaps}  {usual:6.1f}  {_quantiles(beside)}   {frozen}  {rounds:4.1f}"
        f"  {slow:>8}  {outcomes}"
    )


def _quantiles(seconds: list[float]) -> str:
    if not seconds:
        return "     -      -      -"
    return " ".join(f"{np.percentile(seconds, q) * 1000:6.1f}" for q in (50, 90, 99))


HEAD = (
    "  context others  mode           gap ms: p50 p90 p99    usual  beside: p50   p90    p99   frozen ms: p50 p90 p99"
    "  rounds  others slower  outcomes"
)


def main() -> int:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="millrace-micro")
    parser.add_argument("--engine", choices=["vllm", "modelled"], default="vllm", help="modelled: to try the rig")
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024, 4000, 8000])
    parser.add_argument("--loads", type=int, nargs="+", default=[0, 4, 8], help="other streams per engine")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--moves", type=int, default=20, help="migrations per cell")
    parser.add_argument("--separate-cores", action="store_true", help="both engines on one core, for idle rows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker-set", default="{}", metavar="JSON", help="of each, as where two share a GPU's memory")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = stretched(options.model, Path(folder), tokens=max(options.contexts) + 4096)
        extra = ["--policy", "join_shortest_queue", "--set", "telemetry.trace_sample=0"]
        extra += ["--set", "worker=" + options.worker_set]
        extra += ["--processes", "2"] if options.engine == "modelled" else []
        rig = UpRig(Path(folder) / "cluster", model_path=model, engine=options.engine, instances=2, extra=extra)
        rig.start()
        try:
            print(f"{options.model}, two engines, {options.moves} migrations per row, seed {options.seed}")
            if options.separate_cores:
                print(f"{separate(rig)} engine processes on a core of their own")
            print(HEAD, flush=True)
            good = asyncio.run(measure(rig, options, lambda text: print(text, flush=True)))
        finally:
            rig.stop()
    return 0 if good else 1
