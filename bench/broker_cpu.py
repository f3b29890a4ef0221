"""Processor time of the brokers of many modelled engines, live: share of a core per instance, idle and under load.

One cluster of each size with three stages, long requests all the time. Snapshots come as live, fifty a second from each
engine that decodes. Aim: at most 2 percent of a core per instance.

Source of the aim: the stages issue; processor time does not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import httpx
import psutil
from millrace.contracts.codec import decode
from millrace.contracts.migration import MigrationFinished
from nats.aio.msg import Msg

from tests.testbed.migration_operator import Operator
from tests.testbed.timed_streams import client, prompt_ids
from tests.testbed.up_cluster import UpRig

#: Engines at a third of their speed, and tokens told together: that workers and ingress leave the cores to brokers.
WORKER = {"modelled": {"speed": 0.33}, "limits": {"token_interval_ms": 500}}

#: What runs in a cluster, by a part of its command line.
ROLES = ("broker", "worker", "migrator", "coordinator", "ingress", "nats-server")


def processor_s(rig: UpRig) -> dict[str, float]:
    """Processor time so far, by role."""
    spent = dict.fromkeys((*ROLES, "others"), 0.0)
    for process in rig.processes():
        try:
            words, times = " ".join(process.cmdline()), process.cpu_times()
        except psutil.Error:
            continue
        role = next((role for role in ROLES if f"{role}-0.json" in words or f"services.{role}" in words), "others")
        spent["nats-server" if "nats-server" in words else role] += times.user + times.system
    return spent


async def requests(http: httpx.AsyncClient, rig: UpRig, options: argparse.Namespace, until: float) -> int:
    """Keep so many requests running on each instance; returns how many completed."""

    async def one_after_another(index: int) -> int:
        rng, done = Random(f"{options.seed}/{index}"), 0
        await asyncio.sleep(rng.random() * 10)
        while time.monotonic() < until:
            prompt = prompt_ids(rng, round(20 * 2 ** (rng.random() * 5)))
            body = {"model": "m", "prompt": prompt, "max_tokens": rng.randrange(100, 1_500), "ignore_eos": True}
            answer = await http.post(f"{rig.url}/v1/completions", json=body)
            done += answer.status_code == 200
        return done

    count = options.running * options.instances
    return sum(await asyncio.gather(*(one_after_another(index) for index in range(count))))


async def measure(rig: UpRig, options: argparse.Namespace) -> None:
    """Idle, then loaded; prints a row of each."""
    moved = Counter[str]()

    async def hear(message: Msg) -> None:
        body = decode(message.data)
        if isinstance(body, MigrationFinished):
            moved[str(body.outcome)] += 1

    async with client() as http, Operator(rig) as operator:
        await operator.subscribe(operator.subjects.migrations(), hear)
        await asyncio.sleep(5)
        await _row(rig, options, "idle", asyncio.sleep(options.seconds / 5), moved)
        until = time.monotonic() + options.seconds
        load = asyncio.create_task(requests(http, rig, options, until))
        await asyncio.sleep(15)  # until the engines are full
        await _row(rig, options, "loaded", asyncio.sleep(max(1.0, until - time.monotonic())), moved)
        load.cancel()


async def _row(rig: UpRig, options: argparse.Namespace, state: str, wait: Any, moved: Counter[str]) -> None:
    before, began, moves = processor_s(rig), time.monotonic(), moved["moved"]
    psutil.cpu_percent()
    await wait
    busy = psutil.cpu_percent() / 100
    took = time.monotonic() - began
    spent = processor_s(rig)
    shares = {role: (spent[role] - before[role]) / took for role in ROLES}
    each = shares["broker"] / options.instances
    others = "  ".join(f"{role} {share:.0%}" for role, share in shares.items())
    rate = (moved["moved"] - moves) / took
    print(
        f"{options.instances:>9} {state:<7}{took:>6.0f} s{each:>12.2%}{rate:>9.1f}{busy:>9.0%}   {others}", flush=True
    )


def main() -> int:
    """One cluster of each size."""
    from tests.testbed.tiny_llama import build

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=64)
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--trading", default="delay")
    parser.add_argument("--running", type=int, default=4, help="requests per instance at a time")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        extra = ["--stages", str(options.stages), "--trading", options.trading, "--set", "telemetry.trace_sample=0"]
        extra += ["--set", "worker=" + json.dumps(WORKER)]
        model = build(Path(folder) / "model", max_model_len=4_096)
        rig = UpRig(Path(folder) / "c", model_path=model, engine="modelled", instances=options.instances, extra=extra)
        rig.start()
        try:
            print(f"{options.stages} stages, {options.trading}, {options.running} requests per instance at a time")
            columns = f"{'per broker':>12}{'moves/s':>9}{'machine':>9}"
            print(f"{'instances':>9} {'':<7}{'':>8}{columns}   share of a core, by role")
            asyncio.run(measure(rig, options))
        finally:
            rig.stop()
    return 0
