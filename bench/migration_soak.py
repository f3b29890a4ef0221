"""Thousands of migrations under load on two real engines: differing tokens, failed requests, leaked blocks.

Greedy and seeded streams of a random float32 model run all the time on both engines while as many migrations as the
migrators take at once move them to and fro. Each stream's text, finish reason and token count are compared with the
same request's on an undisturbed cluster; at the end every block must be free on both engines.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import httpx

from tests.testbed.migration_operator import Operator
from tests.testbed.timed_streams import TimedStream, client, play
from tests.testbed.up_cluster import UpRig, prompt_text

#: Requests that repeat: each is first run alone, for what it must say.
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 0, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"temperature": 0.7, "seed": 3, "top_p": 0.9, "min_p": 0.02},
)


class Soak:
    """One run."""

    def __init__(self, rig: UpRig, http: httpx.AsyncClient, operator: Operator, options: argparse.Namespace) -> None:
        self._rig, self._http, self._operator, self._options = rig, http, operator, options
        self._rng = Random(options.seed)
        self._expected: dict[int, tuple[str, str, int]] = {}
        self._running: set[str] = set()
        self.outcomes: Counter[str] = Counter()
        self.streams = self.differing = self.failed = 0

    def _fields(self, number: int) -> dict[str, Any]:
        kind = KINDS[number % len(KINDS)]
        return {"prompt": prompt_text(number), "max_tokens": self._options.tokens, "ignore_eos": True, **kind}

    async def learn(self) -> None:
        """Record what each request says when nothing moves."""
        for number in range(self._options.prompts):
            stream = await play(self._http, self._rig, TimedStream(), **self._fields(number))
            assert not stream.error, stream.error
            self._expected[number] = (stream.text, stream.finish, stream.tokens)

    async def run(self) -> None:
        """Streams and movers until enough has moved."""
        done = asyncio.Event()
        streams = [asyncio.create_task(self._stream(done)) for _ in range(self._options.streams)]
        movers = [asyncio.create_task(self._mover(done)) for _ in range(self._options.movers)]
        progress = asyncio.create_task(self._tell())
        await asyncio.gather(*movers)
        await asyncio.gather(*streams)
        progress.cancel()

    async def _stream(self, done: asyncio.Event) -> None:
        while not done.is_set():
            number = self._rng.randrange(self._options.prompts)
            stream = TimedStream(settle=2)
            task = asyncio.create_task(play(self._http, self._rig, stream, **self._fields(number)))
            await stream.settled.wait()
            self._running.add(stream.sequence)
            await task
            self._running.discard(stream.sequence)
            self.streams += 1
            self.failed += bool(stream.error)
            if (stream.text, stream.finish, stream.tokens) != self._expected[number]:
                self.differing += 1
                sys.stderr.write(f"differs: {number} {stream.sequence} {stream.error}\n")

    async def _mover(self, done: asyncio.Event) -> None:
        while self.outcomes["moved"] < self._options.count:
            candidates = [name for name in self._running if name in self._operator.where]
            if not candidates:
                await asyncio.sleep(0.02)
                continue
            sequence = self._rng.choice(candidates)
            finished = await self._operator.migrate(sequence, self._operator.other(sequence))
            if finished is None:
                self.outcomes["unanswered"] += 1
                await asyncio.sleep(0.01)
                continue
            refusal = f" ({finished.refusal})" if finished.refusal else ""
            self.outcomes[f"{finished.outcome}{refusal}"] += 1
        done.set()

    async def _tell(self) -> None:
        began = time.monotonic()
        while True:
            await asyncio.sleep(10)
            sys.stderr.write(f"{time.monotonic() - began:6.0f} s  {self.streams} streams  {dict(self.outcomes)}\n")

    async def leaked(self) -> dict[str, int]:
        """Blocks that are not free although nothing runs, by instance."""
        await asyncio.sleep(3)  # leases and reservations have run out
        return {name: s.blocks_total - s.blocks_free for name, s in sorted(self._operator.snapshots.items())}


async def measure(rig: UpRig, options: argparse.Namespace) -> bool:
    """Runs, prints, judges."""
    async with client() as http, Operator(rig) as operator:
        await operator.know(2)
        soak = Soak(rig, http, operator, options)
        await soak.learn()
        began = time.monotonic()
        await soak.run()
        took = time.monotonic() - began
        leaked = await soak.leaked()
    print(f"  {took:.0f} s; {soak.streams} streams; migrations: {dict(sorted(soak.outcomes.items()))}")
    print(f"  streams that differ {soak.differing}, failed {soak.failed}; blocks not free at the end: {leaked}")
    return not (soak.differing or soak.failed or any(leaked.values()))


def main() -> int:
    """Builds the model, starts the cluster, runs."""
    from tests.testbed.tiny_llama import build

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, help="migrations that must succeed")
    parser.add_argument("--engine", choices=["vllm", "modelled"], default="vllm", help="modelled: to try the rig")
    parser.add_argument("--streams", type=int, default=12)
    parser.add_argument("--movers", type=int, default=4, help="migrations asked for at once")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        extra = ["--policy", "round_robin", "--set", "telemetry.trace_sample=0"]
        extra += ["--processes", "2"] if options.engine == "modelled" else []
        model = build(Path(folder) / "model")
        rig = UpRig(Path(folder) / "cluster", model_path=model, engine=options.engine, instances=2, extra=extra)
        rig.start()
        try:
            print(f"two engines, {options.count} migrations, {options.streams} streams, seed {options.seed}")
            good = asyncio.run(measure(rig, options))
        finally:
            rig.stop()
    return 0 if good else 1
