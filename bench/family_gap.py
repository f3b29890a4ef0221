"""Time that a client waits when its request moves, by family of models, against full attention of the same bytes.

A cluster of two real engines for each family, all at once; streams with prompts of their own move once each by a
request on NATS, in all clusters in turn (``bench.migration_gap`` says what a gap is). A family here has two layers, one
of them of full attention, and vLLM gives a block of each group as many bytes: what is read while a stream stands still
is as many bytes as llama's last block of two layers.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from random import Random

from bench.migration_gap import Cell, move_one
from tests.testbed import moving_families
from tests.testbed.migration_operator import Operator
from tests.testbed.timed_streams import client, prompt_ids
from tests.testbed.up_cluster import UpRig

CONTEXT = 200
BASE = "llama"


async def measure(rigs: dict[str, UpRig], *, moves: int, seed: int) -> dict[str, Cell]:
    """Moves in each cluster in turn, the order drawn anew each time."""
    rng, cells = Random(seed), {name: Cell() for name in rigs}
    async with client() as http, AsyncExitStack() as stack:
        operators = {name: await stack.enter_async_context(Operator(rig)) for name, rig in rigs.items()}
        for operator in operators.values():
            await operator.know(2)
        for _ in range(moves):
            for name in rng.sample(sorted(rigs), len(rigs)):
                prompt = prompt_ids(rng, CONTEXT)
                await move_one(rigs[name], http, operators[name], cells[name], prompt=prompt, mode="live")
    return cells


def main() -> int:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=["gemma3", "granite4-hybrid"], help="beside llama")
    parser.add_argument("--moves", type=int, default=40, help="of each family")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"{options.moves} moves of each family, {CONTEXT} prompt tokens, seed {options.seed}")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        rigs: dict[str, UpRig] = {}
        for name in [BASE, *options.families]:
            model = moving_families.build(Path(folder) / name / "model", moving_families.FAMILIES[name])
            extra = ("--policy", "join_shortest_queue", "--set", "worker.enforce_eager=true")
            rig = UpRig(Path(folder) / name / "c", model_path=model, engine="vllm", instances=2, extra=extra)
            rigs[name] = stack.enter_context(rig)
        cells = asyncio.run(measure(rigs, moves=options.moves, seed=options.seed))
    base = statistics.median(cells[BASE].gaps)
    print("  family             moved   gap ms: p50   p90   usual   frozen ms: p50   gap against llama's")
    for name, cell in cells.items():
        p50, p90 = statistics.median(cell.gaps), statistics.quantiles(cell.gaps, n=10)[-1]
        usual, frozen = statistics.median(cell.usual), statistics.median(cell.frozen)
        print(
            f"  {name:18} {cell.outcomes['moved']:5}   {p50 * 1e3:11.1f} {p90 * 1e3:5.1f}   {usual * 1e3:5.1f}"
            f"   {frozen * 1e3:14.1f}   {p50 / base:19.2f}"
        )
    return 0 if all(set(cell.outcomes) == {"moved"} for cell in cells.values()) else 1
