"""Pause of a stream when its worker is killed (kill -9), and whether its tokens change.

Two engines under `millrace up`; each round starts streams, kills one worker in their middle, waits until it is back.
A client cannot see which streams moved. So if ingress counted N continuations, the N longest pauses are called those of
continued streams: an upper bound. The others show what pauses the restart itself costs on shared cores.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import tempfile
from pathlib import Path

import httpx
import numpy as np

from tests.testbed.timed_streams import TimedStream
from tests.testbed.up_cluster import UpRig, prompt_text, stream

MODELS = Path(__file__).resolve().parent.parent / "models"


async def rounds(rig: UpRig, *, count: int, streams: int, tokens: int) -> tuple[list[float], list[float], int, int]:
    """Gaps of continued streams, usual pauses of the others (seconds), failed streams, streams with changed text."""
    gaps: list[float] = []
    usual: list[float] = []
    failed = changed = 0
    async with httpx.AsyncClient(timeout=180, limits=httpx.Limits(max_connections=None)) as client:
        expected = await _streams(client, rig, streams, tokens)
        for number in range(count):
            before = await rig.metric("millrace_ingress_continuations_total")
            running = asyncio.create_task(_streams(client, rig, streams, tokens))
            await asyncio.sleep(max(result.took_s for result in expected) / 2)
            os.kill(rig.log_pids(f"worker-{number % 2}")[0], signal.SIGKILL)
            results = await running
            continued = int(await rig.metric("millrace_ingress_continuations_total") - before)
            pauses = sorted(result.pause_s for result in results)
            gaps += pauses[len(pauses) - continued :]
            usual += pauses[: len(pauses) - continued]
            failed += sum(bool(result.error) for result in results)
            changed += sum(a.outcome != b.outcome for a, b in zip(results, expected, strict=True))
            await rig.well(2)
    return gaps, usual, failed, changed


async def _streams(client: httpx.AsyncClient, rig: UpRig, count: int, tokens: int) -> list[TimedStream]:
    fields = {"max_tokens": tokens, "ignore_eos": True}
    return list(await asyncio.gather(*(stream(client, rig, prompt_text(n), **fields) for n in range(count))))


def main() -> int:
    """Runs the rounds and prints percentiles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["vllm", "modelled"], default="vllm")
    parser.add_argument("--model", default="millrace-nano")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--worker-set", default="{}", metavar="JSON", help="of each, as where two share a GPU's memory")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        extra = ["--set", "worker=" + options.worker_set]
        extra += ["--processes", "2"] if options.engine == "modelled" else []
        rig = UpRig(
            Path(folder) / "cluster", model_path=MODELS / options.model, engine=options.engine, instances=2, extra=extra
        )
        rig.start()
        try:
            work = rounds(rig, count=options.rounds, streams=options.streams, tokens=options.tokens)
            gaps, usual, failed, changed = asyncio.run(work)
        finally:
            rig.stop()
    print(f"{options.engine}, {options.model}, {options.rounds} kills of a worker, {options.streams} streams each time")
    for name, values in (("continued streams", gaps), ("the others", usual)):
        parts = [f"p{q} {np.percentile(values, q) * 1000 if values else float('nan'):7.0f} ms" for q in (50, 90, 99)]
        print(f"  longest pause of {name:18} n={len(values):4}  {'  '.join(parts)}")
    print(f"  failed streams {failed}, streams whose text or usage changed {changed}")
    return 0 if not failed else 1
