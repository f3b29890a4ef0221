"""Pause of a long stream whose engine is killed (kill -9) with and without KV replicas, and what replicas cost.

Two vLLM engines under `millrace up`, once without and once with ``--kv-replicas``. *Kills*: for each context a stream
with a prompt of its own decodes ``--settle`` tokens, then its engine is killed; the pause is the longest interval
between two events of the stream, the tail what the continuation had to compute. *Price*: ``--streams`` streams at once,
nothing is killed; tokens per second, processor time of all processes per output token, resident memory at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx
from millrace.contracts.codec import decode
from millrace.contracts.migration import KvReplicated
from nats.aio.msg import Msg

from bench.migration.long_context import stretched
from tests.testbed.migration_operator import Operator
from tests.testbed.timed_streams import TimedStream, client, play, prompt_ids
from tests.testbed.up_cluster import UpRig

#: Tokens behind the settled ones, so that the stream has a usual interval afterwards.
REST_TOKENS = 200
#: A replica is awaited for so long before its source is killed, seconds.
PATIENCE_S = 30.0


@dataclass(slots=True)
class Kills:
    """Results of one context. Seconds and tokens."""

    pauses: list[float] = field(default_factory=list)
    usual: list[float] = field(default_factory=list)
    tails: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class Replicas:
    """The last word on each sequence's replica."""

    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}

    async def hear(self, message: Msg) -> None:
        """A notice to some ingress."""
        body: Any = decode(message.data)
        if isinstance(body, KvReplicated):
            self.tokens[body.sequence] = body.tokens


@dataclass(slots=True)
class Killer:
    """Kills engines of a cluster. ``replicas``: None where there are none."""

    rig: UpRig
    http: httpx.AsyncClient
    operator: Operator
    replicas: Replicas | None
    settle: int


async def kill_one(by: Killer, prompt: list[int], cell: Kills) -> None:
    """Starts a stream, kills its engine in its middle, notes the pause."""
    rig, replicas, stream = by.rig, by.replicas, TimedStream(settle=by.settle)
    most = by.settle + REST_TOKENS
    task = asyncio.create_task(play(by.http, rig, stream, prompt=prompt, max_tokens=most, ignore_eos=True))
    await stream.settled.wait()
    deadline = time.monotonic() + PATIENCE_S
    while replicas is not None and replicas.tokens.get(stream.sequence, 0) < len(prompt):
        assert time.monotonic() < deadline, f"no replica of {len(prompt)} tokens: {rig.logs()}"
        await asyncio.sleep(0.005)
    before = await rig.metric("millrace_ingress_replica_tail_tokens_total")
    killed = time.monotonic()
    os.kill(rig.log_pids(by.operator.where[stream.sequence])[-1], signal.SIGKILL)
    await task
    tail = await rig.metric("millrace_ingress_replica_tail_tokens_total") - before
    if stream.error or stream.tokens != most:
        cell.errors.append(stream.error or f"{stream.tokens} tokens")
    else:
        cell.pauses.append(max(stream.intervals(killed - 0.01, 1e12)))
        cell.usual.append(statistics.median(stream.intervals(0, killed)))
        cell.tails.append(tail or len(prompt) + by.settle)
    await rig.well(2)


async def kills(rig: UpRig, options: argparse.Namespace, *, on: bool) -> bool:
    """A row per context. False where a stream failed."""
    rng, good, replicas = Random(options.seed), True, Replicas()
    async with client() as http, Operator(rig) as operator:
        subject = operator.subjects.replicated("any").rpartition(".")[0] + ".*"
        await operator.subscribe(subject, replicas.hear)
        for context in options.contexts:
            cell, by = Kills(), Killer(rig, http, operator, replicas if on else None, options.settle)
            for _ in range(options.kills):
                await kill_one(by, prompt_ids(rng, context), cell)
            good &= not cell.errors
            print(_row(context, cell, on=on), flush=True)
    return good


def _row(context: int, cell: Kills, *, on: bool) -> str:
    if not cell.pauses:
        return f"  {context:7}  {'on' if on else 'off':8}  {cell.errors[0][:60] if cell.errors else '-'}"
    pauses = " ".join(f"{1000 * pause:.0f}" for pause in sorted(cell.pauses))
    return (
        f"  {context:7}  {'on' if on else 'off':8}  {1000 * statistics.median(cell.pauses):9.0f}  {pauses:20}"
        f"  {1000 * statistics.median(cell.usual):6.1f}  {statistics.median(cell.tails):11.0f}  {len(cell.errors)}"
    )


async def price(rig: UpRig, options: argparse.Namespace, *, on: bool) -> bool:
    """One row of throughput, processor time and memory. False where a stream failed."""
    rng = Random(options.seed)
    async with client() as http:
        await _load(rig, http, rng, options, tokens=50)
        before, began = _cpu_s(rig), time.monotonic()
        streams = await _load(rig, http, rng, options, tokens=options.tokens)
        took_s, cpu_s = time.monotonic() - began, _cpu_s(rig) - before
    tokens = sum(stream.tokens for stream in streams)
    failed = sum(bool(stream.error) for stream in streams)
    resident = sum(process.memory_info().rss for process in rig.processes()) / 2**20
    print(
        f"  {'on' if on else 'off':8}  {tokens / took_s:8.0f}  {1e3 * cpu_s / max(1, tokens):12.3f}"
        f"  {resident:8.0f}  {failed}",
        flush=True,
    )
    return not failed


async def _load(
    rig: UpRig, http: httpx.AsyncClient, rng: Random, options: argparse.Namespace, *, tokens: int
) -> list[TimedStream]:
    prompts = [prompt_ids(rng, options.prompt) for _ in range(options.streams)]
    return list(
        await asyncio.gather(
            *(play(http, rig, TimedStream(), prompt=p, max_tokens=tokens, ignore_eos=True) for p in prompts)
        )
    )


def _cpu_s(rig: UpRig) -> float:
    times = [process.cpu_times() for process in rig.processes()]
    return sum(each.user + each.system for each in times)


def main() -> int:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="millrace-micro")
    parser.add_argument("--engine", choices=["vllm", "modelled"], default="vllm", help="modelled: to try the rig")
    parser.add_argument("--contexts", type=int, nargs="*", default=[500, 2000, 7000])
    parser.add_argument("--kills", type=int, default=3, help="per context")
    parser.add_argument("--settle", type=int, default=200, help="output tokens before the kill")
    parser.add_argument("--streams", type=int, default=16, help="of the price; 0 leaves it out")
    parser.add_argument("--prompt", type=int, default=400, help="tokens, of the price's streams")
    parser.add_argument("--tokens", type=int, default=600, help="output tokens of each")
    parser.add_argument("--sides", nargs="+", choices=["off", "on"], default=["off", "on"])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        longest = max([*options.contexts, options.prompt + options.tokens]) + 1024
        model = stretched(options.model, Path(folder), tokens=longest)
        print(f"{options.model}, two engines, {options.kills} kills per row, seed {options.seed}")
        results = [_side(side, model, Path(folder), options) for side in options.sides]
    return 0 if all(results) else 1


def _side(side: str, model: Path, folder: Path, options: argparse.Namespace) -> bool:
    # Without a prefix cache: a second prompt of the same letters must not be found there.
    worker = json.dumps({"enable_prefix_caching": False} if options.engine == "vllm" else {})
    extra = ["--policy", "join_shortest_queue", "--set", "telemetry.trace_sample=0", "--set", "worker=" + worker]
    extra += ["--processes", "2"] if options.engine == "modelled" else []
    extra += ["--kv-replicas"] if side == "on" else []
    rig = UpRig(folder / side, model_path=model, engine=options.engine, instances=2, extra=extra)
    rig.start()
    try:
        good = True
        if options.streams:
            print("  replicas  tokens/s  CPU ms/token  RSS MiB  failed")
            good &= asyncio.run(price(rig, options, on=side == "on"))
        if options.contexts:
            print("  context  replicas  pause ms   each                  usual  tail tokens  failed")
            good &= asyncio.run(kills(rig, options, on=side == "on"))
        return good
    finally:
        rig.stop()


if __name__ == "__main__":
    raise SystemExit(main())
