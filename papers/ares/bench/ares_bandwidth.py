"""Share of a token's time that the transfer of a move takes, by link, as ARES's figure 11 has it, and of a live move.

    python -m bench ares_bandwidth

One watched request goes to and fro between two modelled engines in virtual time, KV of 57,344 bytes a token
(DeepSeek-R1-Distill-Qwen-7B). `share` is the part of the longest interval between two of its tokens around the move
that its usual interval does not explain. Aim: 95.5 +-5 % at 10 Gb/s on an H800 where a sequence stands still for its
copy; the paper does not say how long the request is, and its mean length is 2,000 tokens (section 5.3). An H800
decodes as an H100 does; the RTX 4090D is that of `bench ares_testbed`.
"""

from __future__ import annotations

import argparse
import statistics

from millrace.contracts.migration import MigrationMode

from bench.migration_sim import Cell, Stage
from bench.scenarios.tables import table

TOKEN_BYTES = 57_344
DEVICES = {"H800": "h100-llama-3-8b", "RTX 4090D": "rtx4090d-qwen-7b-w8a8"}
MODES = (MigrationMode.STOP_AND_COPY, MigrationMode.LIVE)
HEADS = ("", "context", "mode", "moves", "usual ms", "gap ms p50", "share %", "frozen ms p50", "KV MB")


def main() -> int:
    """Prints a table; returns 1 where a move did not end well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gbps", type=float, nargs="+", default=[10, 25, 100])
    parser.add_argument("--contexts", type=int, nargs="+", default=[2_000, 8_000, 30_000], help="tokens")
    parser.add_argument("--others", type=int, default=4, help="decoding sequences on each engine")
    parser.add_argument("--moves", type=int, default=2, help="in each mode, per seed")
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    lines: list[list[str]] = []
    failed = 0
    for device in DEVICES:
        for gbps in options.gbps:
            for context in options.contexts:
                cells = _cells(options, device, gbps, context)
                failed += sum(cell.outcomes.total() - cell.outcomes["moved"] for cell in cells.values())
                lines += [_line(device, gbps, context, mode, cell) for mode, cell in cells.items()]
    print(f"seeds 0 to {options.seeds - 1}, {options.others} others on each engine; virtual time")
    print(table(HEADS, lines))
    return int(failed > 0)


def _cells(options: argparse.Namespace, device: str, gbps: float, context: int) -> dict[MigrationMode, Cell]:
    cells = {mode: Cell() for mode in MODES}
    for seed in range(options.seeds):
        stage = Stage(gbps=gbps, others=options.others, seed=seed, step_time=DEVICES[device], token_bytes=TOKEN_BYTES)
        stage.watch(context, cells, options.moves)
    return cells


def _line(device: str, gbps: float, context: int, mode: MigrationMode, cell: Cell) -> list[str]:
    gap, usual = statistics.median(cell.gaps), statistics.median(cell.usual)
    figures = (usual, gap, 100 * (gap - usual) / gap, statistics.median(cell.frozen), context * TOKEN_BYTES / 1e6)
    told = [f"{value:,.1f}" for value in figures]
    return [f"{device}, {gbps:g} Gb/s", f"{context:,}", mode, str(cell.outcomes["moved"]), *told]
