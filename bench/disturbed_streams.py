"""Streams of two vLLM engines under `millrace up` whose engines are killed or drained: what fails, changes, how long.

Half of the streams are greedy, half seeded (temperature 0.8), with prompts of their own. They run once undisturbed,
once more undisturbed (what changes by itself: batches differ), and with one of the engines killed (kill -9), then the
other. Drains: each engine is taken out and started again in turn, while that many streams run; how long `drain` and
the start took, and what was left to be computed anew. Prints one line a run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import tempfile
import time
from pathlib import Path
from random import Random

from tests.testbed.timed_streams import TimedStream, client, play, prompt_ids
from tests.testbed.up_cluster import UpRig

MODELS = Path(__file__).resolve().parent.parent / "models"
COUNTERS = {"computed anew": "millrace_ingress_continuations_total", "moved": "millrace_ingress_migrations_total"}


async def streams(rig: UpRig, options: argparse.Namespace, started: asyncio.Event) -> list[TimedStream]:
    """All streams, ``--at-once`` at a time; ``started`` is set when a quarter of them has begun."""
    rng, room = Random(options.seed), asyncio.Semaphore(options.at_once)
    prompts = [prompt_ids(rng, options.prompt) for _ in range(options.streams)]
    begun = 0

    async with client() as http:

        async def one(number: int) -> TimedStream:
            nonlocal begun
            async with room:
                begun += 1
                if begun > min(options.at_once, options.streams) // 2:
                    started.set()
                drawn = {"temperature": 0.8, "seed": number} if number % 2 else {}
                fields = {"prompt": prompts[number], "max_tokens": options.tokens, "ignore_eos": True, **drawn}
                return await play(http, rig, TimedStream(), **fields)

        return list(await asyncio.gather(*map(one, range(options.streams))))


async def run(
    rig: UpRig, options: argparse.Namespace, name: str, expected: list[TimedStream] | None
) -> list[TimedStream]:
    """One run, and its line; ``name`` says what happens meanwhile."""
    before = {what: await rig.metric(metric) for what, metric in COUNTERS.items()}
    started, began = asyncio.Event(), time.monotonic()
    doing = asyncio.create_task(streams(rig, options, started))
    await started.wait()
    await asyncio.sleep(options.settle)
    notes = []
    if name == "kills":
        for number in range(2):
            notes.append(await _killed(rig, f"worker-{number}"))
    elif name == "drains":
        for number in range(2):
            notes.append(await _drained(rig, f"worker-{number}"))
    went_on = not doing.done()
    results = await doing
    took_s = time.monotonic() - began
    counted = [f"{what} {await rig.metric(metric) - before[what]:.0f}" for what, metric in COUNTERS.items()]
    failed = [stream.error for stream in results if stream.error]
    line = f"  {name:12} {took_s:6.1f} s, {sum(s.tokens for s in results) / took_s:5.0f} tokens/s, failed {len(failed)}"
    if expected is not None:
        changed = [
            not stream.error and stream.text != known.text for stream, known in zip(results, expected, strict=True)
        ]
        line += f", changed {sum(changed[::2])} greedy, {sum(changed[1::2])} seeded of {len(changed) // 2} each"
    pauses = sorted(max(stream.intervals(0, 1e12), default=0.0) for stream in results)
    line += (
        f", longest pause p50 {pauses[len(pauses) // 2]:.2f} s, max {pauses[-1]:.2f} s; {', '.join(counted + notes)}"
    )
    print(line + ("" if went_on or name.startswith("un") else " (the load ended first)"), flush=True)
    for error in failed[:3]:
        print(f"    {error[:200]}", flush=True)
    await rig.well(2)
    return results


async def _killed(rig: UpRig, instance: str) -> str:
    """Kills an engine, and waits until others of its processes are there and ready."""
    before = rig.log_pids(instance)
    os.kill(before[-1], signal.SIGKILL)
    killed = time.monotonic()
    await rig.until_seen(lambda _: not set(rig.log_pids(instance)) & set(before), 60.0)
    await rig.well(2)
    return f"back {time.monotonic() - killed:.1f} s"


async def _drained(rig: UpRig, instance: str) -> str:
    began = time.monotonic()
    words = await asyncio.to_thread(rig.cli, "drain", instance)
    drained = time.monotonic()
    await asyncio.to_thread(rig.cli, "drain", instance, "--back")
    await rig.well(2)
    said = re.sub(
        rf"^{instance}: ", "", next((line for line in words.splitlines() if " moved, " in line), words.strip())
    )
    return f"{instance}: drain {drained - began:.1f} s, back {time.monotonic() - drained:.1f} s ({said})"


async def side(rig: UpRig, options: argparse.Namespace) -> None:
    """All runs against one cluster."""
    await run(rig, options, "undisturbed", None)  # compiles, fills caches
    expected = await run(rig, options, "undisturbed", None)
    for name in ["undisturbed", *options.runs]:
        await run(rig, options, name, expected)


def main() -> int:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="millrace-mini")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=200)
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--tokens", type=int, default=600, help="output tokens of each")
    parser.add_argument("--settle", type=float, default=3.0, help="seconds before the first disturbance")
    parser.add_argument("--runs", nargs="+", choices=["kills", "drains"], default=["kills", "drains"])
    parser.add_argument("--replicas", nargs="+", choices=["off", "on"], default=["off", "on"])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for replicas in options.replicas:
        print(f"{options.model}, two engines, {options.streams} streams of {options.tokens} tokens, "
              f"{options.at_once} at once, seed {options.seed}, replicas {replicas}")  # fmt: skip
        extra = ["--set", "telemetry.trace_sample=0", "--set", "worker=" + json.dumps({"max_model_len": 2048})]
        with tempfile.TemporaryDirectory() as folder:
            extra += ["--kv-replicas"] if replicas == "on" else []
            rig = UpRig(Path(folder), model_path=MODELS / options.model, engine="vllm", instances=2, extra=extra)
            with rig:
                asyncio.run(side(rig, options))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
