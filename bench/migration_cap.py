"""Cost of a migration to the other sequences, by how much an engine may copy between two steps.

Two real engines, streams that decode all the time on both, and one long sequence that is moved there and back. Prefix
caches are off, so that every move copies the whole context. An interval between two tokens of another stream belongs to
a migration if it ends between the request and the answer, and to its control if it ends in a window of the same length
before or after. The slow-down is the ratio of their means; its interval is a bootstrap over migrations.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import httpx
import msgspec
import numpy as np

from bench.migration.long_context import stretched
from bench.migration.others import Others
from tests.testbed.migration_operator import Operator
from tests.testbed.timed_streams import TimedStream, client, play, prompt_ids
from tests.testbed.up_cluster import UpRig

#: Quiet time before and after a migration, of which its control windows are taken, seconds.
PAUSE_S = 0.4
_RESAMPLED = 2000


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """One migration. Seconds.

    Attributes:
        inside, beside: Intervals of other streams during it, and in its control windows.
    """

    took: float
    gap: float
    bytes: int
    inside: list[float]
    beside: list[float]


async def moves(
    rig: UpRig, http: httpx.AsyncClient, *, load: int, context: int, count: int, seed: int
) -> tuple[list[Move], int]:
    """Moves one sequence so often; how many attempts did not move it."""
    rng, made, failed = Random(seed), list[Move](), 0
    async with Operator(rig) as operator:
        await operator.know(2)
        others = Others(rig, http, count=2 * load, seed=seed)
        while len(made) < count and failed <= count:
            stream = TimedStream()
            prompt = prompt_ids(rng, context)
            task = asyncio.create_task(play(http, rig, stream, prompt=prompt, max_tokens=1500, ignore_eos=True))
            await stream.settled.wait()
            while not task.done() and len(made) < count:
                await asyncio.sleep(2 * PAUSE_S)
                if task.done() or stream.sequence not in operator.where:
                    break
                move = await _move(operator, stream, others)
                failed += move is None
                made += [move] if move else []
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await others.stop()
    return made, failed


async def _move(operator: Operator, stream: TimedStream, others: Others) -> Move | None:
    asked = time.monotonic()
    finished = await operator.migrate(stream.sequence, operator.other(stream.sequence))
    answered = time.monotonic()
    await asyncio.sleep(2 * PAUSE_S)
    if finished is None or finished.outcome != "moved":
        return None
    took = answered - asked
    width = min(took, PAUSE_S)
    control = [(asked - width - 0.02, asked - 0.02), (answered + 0.1, answered + 0.1 + width)]
    return Move(
        took=took,
        gap=max(stream.intervals(asked, answered + 0.05)),
        bytes=finished.cost.bytes,
        inside=others.intervals([(asked, answered)], within=True),
        beside=others.intervals(control, within=True),
    )


def slow_down(made: Sequence[Move], seed: int = 0) -> tuple[float, float, float]:
    """Ratio of mean intervals inside and beside, less one: estimate and 95 % interval over migrations."""
    rng = np.random.default_rng(seed)
    sums = np.array([[sum(m.inside), len(m.inside), sum(m.beside), len(m.beside)] for m in made])

    def ratio(rows: np.ndarray) -> float:
        inside, inside_count, beside, beside_count = rows.sum(axis=0)
        return float((inside / inside_count) / (beside / beside_count) - 1)

    drawn = [ratio(sums[rng.integers(len(sums), size=len(sums))]) for _ in range(_RESAMPLED)]
    return ratio(sums), float(np.percentile(drawn, 2.5)), float(np.percentile(drawn, 97.5))


def line(cap: int, load: int, made: Sequence[Move], failed: int) -> str:
    """One row."""
    estimate, low, high = slow_down(made)
    took, gap = (statistics.median(values) * 1000 for values in ([m.took for m in made], [m.gap for m in made]))
    usual = statistics.mean(x for m in made for x in m.beside) * 1000
    size = statistics.mean(m.bytes for m in made) / 2**20
    return (
        f"  {cap / 1024:9.0f} {load:6} {size:8.1f} {took:8.0f} {gap:8.1f} {usual:8.1f}"
        f"   {100 * estimate:+6.1f} % ({100 * low:+.1f} to {100 * high:+.1f})   {len(made):4} {failed:6}"
    )


HEAD = "  KiB a step others      MiB  took ms   gap ms usual ms   others slower (95 %)        moved failed"


def main() -> int:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="millrace-micro")
    parser.add_argument("--caps", type=int, nargs="+", default=[256, 1024, 4096, 16384], help="KiB between two steps")
    parser.add_argument("--context", type=int, default=8000, help="tokens of the sequence that is moved")
    parser.add_argument("--load", type=int, default=4, help="other streams per engine")
    parser.add_argument("--moves", type=int, default=40, help="migrations per row")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"{options.model}, two engines, a sequence of {options.context} tokens, seed {options.seed}")
    print(HEAD, flush=True)
    good = True
    for cap in options.caps:
        with tempfile.TemporaryDirectory() as folder:
            good &= _row(options, cap << 10, Path(folder))
    return 0 if good else 1


def _row(options: argparse.Namespace, cap: int, folder: Path) -> bool:
    model = stretched(options.model, folder, tokens=options.context + 4096)
    settings = json.dumps({"enable_prefix_caching": False, "migration": {"copy_bytes_per_step": cap}})
    extra = ["--policy", "round_robin", "--set", "telemetry.trace_sample=0", "--set", "worker=" + settings]
    rig = UpRig(folder / "cluster", model_path=model, engine="vllm", instances=2, extra=extra)
    rig.start()

    async def run() -> tuple[list[Move], int]:
        async with client() as http:
            return await moves(
                rig, http, load=options.load, context=options.context, count=options.moves, seed=options.seed
            )

    try:
        made, failed = asyncio.run(run())
    finally:
        rig.stop()
    print(
        line(cap, options.load, made, failed) if made else f"  {cap >> 10:9} nothing moved, {failed} failed", flush=True
    )
    return bool(made)
