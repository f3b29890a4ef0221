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
import json
import tempfile
import time
from collections import Counter
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

import httpx
import msgspec
from millrace.contracts.migration import MigrationFinished, MigrationOutcome
from millrace.contracts.plan import InstanceRole

from bench.live.role_orders import RoleOperator
from bench.migration.streams import TimedStream, client, play
from bench.up_cluster import UpRig, prompt_text

BOTH, PREFILL, DECODE = InstanceRole

#: Orders that never leave a phase without anybody. Half of the changes need the last hop.
ORDERS = (
    ("worker-0", PREFILL), ("worker-1", DECODE), ("worker-1", BOTH), ("worker-0", DECODE),
    ("worker-1", PREFILL), ("worker-1", BOTH), ("worker-0", BOTH),
)  # fmt: skip

#: Shorter than the defaults (10, 2 and 5 s), so that a hundred flips take minutes.
FENCES = {"gap_s": 1.0, "settle_s": 1.0, "drain_s": 2.0}

#: Requests that repeat: each is first run alone, for what it must say.
KINDS: tuple[dict[str, Any], ...] = ({"temperature": 0}, {"temperature": 0.9, "seed": 7}, {"temperature": 0})


class FlipRow(msgspec.Struct, frozen=True, kw_only=True):
    """One call. Times in seconds."""

    flips: int
    given_up: int
    streams: int
    failed: int
    differing: int
    moved: int
    not_moved: int
    took_s: list[float]
    blocks_left: int


class FlipLoad:
    """Streams that run all the time.

    Attributes:
        streams, failed, differing: Counts of those that ended.
    """

    def __init__(self, rig: UpRig, http: httpx.AsyncClient, *, tokens: int, prompts: int, seed: int) -> None:
        self._rig, self._http, self._tokens, self._prompts = rig, http, tokens, prompts
        self._rng = Random(seed)
        self._expected: dict[int, tuple[str, str, int]] = {}
        self.streams = self.failed = self.differing = 0
        self.errors: Counter[str] = Counter()

    def _fields(self, number: int) -> dict[str, Any]:
        kind = KINDS[number % len(KINDS)]
        return {"prompt": prompt_text(number), "max_tokens": self._tokens, "ignore_eos": True, **kind}

    async def learn(self) -> None:
        """Records what each request says while nothing moves."""
        numbers = range(self._prompts)
        told = await asyncio.gather(*(play(self._http, self._rig, TimedStream(), **self._fields(n)) for n in numbers))
        for number, stream in zip(numbers, told, strict=True):
            assert not stream.error, stream.error
            self._expected[number] = (stream.text, stream.finish, stream.tokens)

    async def run(self, done: asyncio.Event) -> None:
        """One stream after the other."""
        while not done.is_set():
            number = self._rng.randrange(self._prompts)
            stream = await play(self._http, self._rig, TimedStream(), **self._fields(number))
            self.streams += 1
            self.failed += bool(stream.error)
            if stream.error:
                self.errors[stream.error] += 1
            self.differing += (stream.text, stream.finish, stream.tokens) != self._expected[number]


async def measure(rig: UpRig, *, flips: int, limit_s: float, streams: int, tokens: int, seed: int) -> FlipRow:
    """Flips under load for so long, or so often."""
    async with client() as http, RoleOperator(rig) as operator:
        load = FlipLoad(rig, http, tokens=tokens, prompts=12, seed=seed)
        await load.learn()
        moves: Counter[bool] = Counter()
        await operator.watch_moves(lambda body: _count(moves, body))
        done = asyncio.Event()
        players = [asyncio.create_task(load.run(done)) for _ in range(streams)]
        began = time.monotonic()
        for instance, role in cycle(ORDERS):
            if len(operator.took_s) >= flips or time.monotonic() - began > limit_s:
                break
            await operator.flip(instance, role)
        done.set()
        await asyncio.gather(*players)
        for instance in ("worker-0", "worker-1"):
            await operator.flip(instance, BOTH)
            operator.took_s.pop()
        given_up = operator.told.flips_given_up if operator.told is not None else 0
    for error, count in load.errors.items():
        print(f"  {count} x {error}")
    return FlipRow(
        flips=len(operator.took_s),
        given_up=given_up,
        streams=load.streams,
        failed=load.failed,
        differing=load.differing,
        moved=moves[True],
        not_moved=moves[False],
        took_s=[round(took_s, 2) for took_s in operator.took_s],
        blocks_left=await _blocks_left(rig),
    )


def _count(moves: Counter[bool], body: MigrationFinished) -> None:
    moves[body.outcome is MigrationOutcome.MOVED] += 1


async def _blocks_left(rig: UpRig) -> int:
    """Blocks that are not free although nothing runs."""
    await asyncio.sleep(3)  # leases and reservations have run out
    return (await rig.totals()).blocks_used


def options_of(engine: str) -> list[str]:
    """Options of `millrace up` for two instances whose roles flip often, with brokers."""
    fences = json.dumps({"flips": FENCES})
    options = ["--trading", "none", "--policy", "round_robin", "--trace-sample", "0", "--coordinator-set", fences]
    return [*options, *(["--processes", "2"] if engine == "modelled" else [])]


def main() -> int:
    """Builds the model, starts the cluster, flips, prints; fails where a request failed or differed."""
    from tests.engine.tiny_llama import build

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
        f"  {sums['flips']} flips ({sums['given_up']} given up), each {median:.1f} s in the median, "
        f"{max(took, default=0.0):.1f} s at most, by fences of {FENCES['gap_s']:g} s\n"
        f"  {sums['streams']} streams: {sums['failed']} failed, {sums['differing']} differ\n"
        f"  {sums['moved']} moves and {sums['not_moved']} that did not happen; "
        f"{sums['blocks_left']} blocks not free at the end"
    )


if __name__ == "__main__":
    raise SystemExit(main())
