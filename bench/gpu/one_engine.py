"""One real engine behind ``millrace up``: time to start, tokens per second by concurrency, and whether its KV may move.

    python -m bench.gpu.one_engine --model models/millrace-mini --self-test

With ``--self-test`` the engine moves a sequence to itself at its start; the exit status is 1 where it then refuses to
move anything.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from pathlib import Path

import httpx
from millrace.cli.cluster_rows import InstanceRow
from millrace.cli.cluster_view import ClusterView

from tests.testbed.up_cluster import Streamed, UpRig, prompt_text, stream

CONCURRENCY = (1, 8, 32, 128)
TOKENS = 128


def main() -> int:
    """Starts the engine, prints the figures, stops it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a model")
    parser.add_argument("--engine", choices=["vllm", "modelled"], default="vllm", help="modelled: to try the rig")
    parser.add_argument("--self-test", action="store_true")
    parser.add_argument("--concurrency", type=int, nargs="+", default=list(CONCURRENCY))
    options = parser.parse_args()
    extra = [
        "--set",
        "worker=" + json.dumps({"migration": {"self_test": options.self_test}}),
        "--set",
        "telemetry.trace_sample=0",
    ]
    with tempfile.TemporaryDirectory() as folder:
        rig = UpRig(Path(folder) / "c", model_path=options.model, engine=options.engine, instances=1, extra=extra)
        began = time.monotonic()
        try:
            rig.start()
            print(f"{options.model.name}: ready after {time.monotonic() - began:.0f} s", flush=True)
            row = asyncio.run(measured(rig, options.concurrency))
        finally:
            rig.stop()
    print(f"KV moves by: {', '.join(row.kv)}" if row.kv else f"KV does not move: {row.kv_refusal}")
    return int(options.self_test and not row.kv)


async def measured(rig: UpRig, concurrency: list[int]) -> InstanceRow:
    """Print a row for each number of streams; return what status tells of the instance."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:
        await together(client, rig, 1)  # compiles and captures
        print(f"{'streams':>8} {'tokens/s':>10} {'per stream':>11} {'longest pause':>14}")
        for count in concurrency:
            began = time.monotonic()
            streams = await together(client, rig, count)
            rate = count * TOKENS / (time.monotonic() - began)
            pause = max(one.pause_s for one in streams)
            print(f"{count:>8} {rate:>10,.0f} {rate / count:>11,.1f} {pause * 1e3:>11.0f} ms", flush=True)
    return await told(rig)


async def together(client: httpx.AsyncClient, rig: UpRig, count: int) -> list[Streamed]:
    """So many streams at once.

    Raises:
        SystemExit: one failed.
    """
    work = (stream(client, rig, prompt_text(n), max_tokens=TOKENS, ignore_eos=True) for n in range(count))
    streams = await asyncio.gather(*work)
    if errors := [one.error for one in streams if one.error]:
        sys.exit(f"{len(errors)} of {count} streams failed, the first: {errors[0]}\n{rig.logs()}")
    return list(streams)


async def told(rig: UpRig) -> InstanceRow:
    """Row of the one instance as status shows it."""
    rows: list[InstanceRow] = []

    def seen(view: ClusterView) -> bool:
        rows[:] = view.instances(time.time_ns())
        return bool(rows)

    await rig.until_seen(seen)
    return rows[0]


if __name__ == "__main__":
    # One that is stopped, as by first_hour, takes its cluster along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
