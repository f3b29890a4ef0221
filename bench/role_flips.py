"""Flips of roles under load on two real engines: failed requests, differing tokens, and how long a flip takes.

    python -m bench role_flips --flips 100 --rows flips.jsonl

Greedy and seeded streams of a random float32 model run all the time while an operator gives the two instances one role
after the other: each prefills, decodes and does both in turn, so that requests are handed off in both directions and
whole batches leave. Each stream's text, finish reason and token count are compared with the same request's on the
undisturbed cluster. With ``--rows`` each call adds its figures to a file and makes as many flips as the file lacks, at
most for ``--limit`` seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

import msgspec

from bench.live.role_flips import FENCES, FlipRow, measure, options_of
from tests.testbed.up_cluster import UpRig


def main() -> int:
    """Builds the model, starts the cluster, flips, prints; fails where a request failed or differed."""
    from tests.testbed.tiny_llama import build

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=100, help="in all calls together (default %(default)s)")
    parser.add_argument("--limit", type=float, default=400.0, metavar="S", help="of this call (default %(default)s)")
    parser.add_argument("--rows", type=Path, help="keep each call's figures here, JSON lines, and go on from them")
    parser.add_argument("--engine", choices=["vllm", "modelled"], default="vllm", help="modelled: to try the rig")
    parser.add_argument("--streams", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = _rows(options.rows)
    missing = options.flips - sum(row.flips for row in rows)
    if missing > 0:
        with tempfile.TemporaryDirectory() as folder:
            model = build(Path(folder) / "model")
            words = options_of(options.engine)
            rig = UpRig(Path(folder) / "c", model_path=model, engine=options.engine, instances=2, extra=words)
            rig.start()
            try:
                row = asyncio.run(
                    measure(
                        rig,
                        flips=missing,
                        limit_s=options.limit,
                        streams=options.streams,
                        tokens=options.tokens,
                        seed=options.seed + len(rows),
                    )
                )
            finally:
                rig.stop()
        rows.append(row)
        if options.rows is not None:
            with options.rows.open("ab") as file:
                file.write(msgspec.json.encode(row) + b"\n")
    print(_told(rows, options))
    return int(any(row.failed or row.differing or row.blocks_left for row in rows))


def _rows(path: Path | None) -> list[FlipRow]:
    if path is None or not path.exists():
        return []
    return [msgspec.json.decode(line, type=FlipRow) for line in path.read_bytes().splitlines()]


def _told(rows: list[FlipRow], options: argparse.Namespace) -> str:
    took = sorted(took_s for row in rows for took_s in row.took_s)
    sums = {name: sum(getattr(row, name) for row in rows) for name in FlipRow.__struct_fields__ if name != "took_s"}
    median = took[len(took) // 2] if took else 0.0
    return (
        f"two {options.engine} engines, {options.streams} streams of {options.tokens} tokens, {len(rows)} calls\n"
        f"  {sums['flips']} flips, each {median:.1f} s in the median, "
        f"{max(took, default=0.0):.1f} s at most, by fences of {FENCES['gap_s']:g} s\n"
        f"  {sums['streams']} streams: {sums['failed']} failed, {sums['differing']} differ\n"
        f"  {sums['moved']} moves and {sums['not_moved']} that did not happen; "
        f"{sums['blocks_left']} blocks not free at the end"
    )


if __name__ == "__main__":
    raise SystemExit(main())
