"""Bandwidth of the host's copiers against memcpy of the same bytes, 1 to 10,000 pieces; planner and checksum speeds.

Two processes: a child owns the source's memory, this one reads it. Pieces are cut out of twice as much memory and
shuffled on both sides. ``memcpy`` copies the same bytes in one piece within this process, ``local`` the pieces with
the copier's own loop. The ways take turns, so that what else the machine does meets them alike; each figure is the best
of the rounds (what the way can do), the share is of the memcpy in its row.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np
from millrace.contracts.kv import KvPlane, KvRank
from millrace.kvcopy.checksum import BlockChecksums
from millrace.kvcopy.copier_port import CopyPlan, Link
from millrace.kvcopy.memory import SharedRegion
from millrace.kvcopy.plan import Planner
from millrace.kvcopy.shared_memory_copier import SharedMemoryCopier, copy_pieces

SEED = 1
MIB = 1 << 20
PIECES = (1, 10, 64, 1_000, 10_000)
PAGE = 4096


def main() -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64, help="MiB of each transfer, 20 or more")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"seed {SEED}, {arguments.rounds} rounds, load {load:.1f}; GB/s (share of memcpy)")
    with tempfile.TemporaryDirectory() as folder:
        _copies(Path(folder), bytes_=arguments.mib * MIB, rounds=arguments.rounds)
    _planner()
    _checksums()
    return 0


def _copies(folder: Path, *, bytes_: int, rounds: int) -> None:
    here, there = multiprocessing.get_context("spawn").Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_own, args=(there, folder, 2 * bytes_), daemon=True)
    child.start()
    peer: KvRank = msgspec.msgpack.decode(here.recv_bytes(), type=KvRank)
    region = SharedRegion(2 * bytes_)
    region.view[:] = 1
    source = SharedRegion(2 * bytes_).view
    source[:] = 2
    shared = SharedMemoryCopier(region, folder / "target")
    links: dict[str, Link] = {"shared memory": shared.connect(peer)}
    first = _seconds(partial(carry_out, links["shared memory"], shuffled(1, bytes_)))
    print(f"first read of a mapping, {bytes_ // MIB} MiB in one piece (page faults): {bytes_ / first / 1e9:.1f} GB/s")
    print(f"{'pieces':>7} {'of':>9} {'memcpy':>7} {'local':>13} " + " ".join(f"{name:>15}" for name in links))
    for pieces in PIECES:
        plan = shuffled(pieces, bytes_)
        whole = partial(np.copyto, region.view[: plan.bytes], source[: plan.bytes])
        ways: list[Callable[[], object]] = [whole, partial(copy_pieces, plan, source, region.view, (0, 0), bytes_)]
        ways += [partial(carry_out, link, plan) for link in links.values()]
        memcpy, *others = [plan.bytes / seconds / 1e9 for seconds in _best(ways, rounds)]
        told = " ".join(f"{rate:>9.1f} ({rate / memcpy:3.0%})" for rate in others)
        print(f"{pieces:>7} {int(plan.lengths[0]) // 1024:>6} KiB {memcpy:>7.1f} {told}")
    for link in links.values():
        link.close()
    here.send_bytes(b"end")
    child.join()


def _own(pipe: Connection, folder: Path, bytes_: int) -> None:
    """The other process."""
    region = SharedRegion(bytes_)
    region.view[:] = 3
    copier = SharedMemoryCopier(region, folder / "source")
    rank = copier.offer(KvRank(planes=[KvPlane(0, PAGE, PAGE)], region_bytes=region.size))
    pipe.send_bytes(msgspec.msgpack.encode(rank))
    pipe.recv_bytes()
    copier.close()


def shuffled(pieces: int, bytes_: int) -> CopyPlan:
    """So many equal pieces out of a region of twice the bytes, no two of them neighbours on both sides."""
    length = bytes_ // pieces // PAGE * PAGE or PAGE
    generator = np.random.default_rng(SEED)
    places = 2 * bytes_ // length
    source, target = (generator.permutation(places)[:pieces].astype(np.int64) * length for _ in range(2))
    return CopyPlan(source=source, target=target, lengths=np.full(pieces, length, dtype=np.int64))


def carry_out(link: Link, plan: CopyPlan) -> None:
    """A whole transfer."""
    transfer = link.begin(plan)
    while not transfer.advance(1 << 40):
        pass


def _planner() -> None:
    blocks, planes, size = 20_000, 64, PAGE
    layouts = {
        "block-major": [KvPlane(index * size, planes * size, size) for index in range(planes)],
        "layer-major": [KvPlane(index * blocks * size, size, size) for index in range(planes)],
    }
    draw = random.Random(SEED)
    lists = {
        "one run": (list(range(1000)), list(range(500, 1500))),
        "descending": (list(range(1000))[::-1], list(range(500, 1500))[::-1]),
        "scattered": (draw.sample(range(blocks), 1000), draw.sample(range(blocks), 1000)),
    }
    print(f"planner, 1,000 blocks of {planes} planes: us (descriptors)")
    for name, layout in layouts.items():
        rank = KvRank(planes=layout, region_bytes=blocks * planes * size)
        planner = Planner(rank, rank)
        rows = [
            f"{of} {_us(partial(planner.plan, *pair))} ({planner.plan(*pair).descriptors})"
            for of, pair in lists.items()
        ]
        print(f"  {name}: {', '.join(rows)}")


def _us(call: Callable[[], object]) -> str:
    seconds = sorted(_seconds(call) for _ in range(300))
    return f"best {seconds[0] * 1e6:.0f}, median {seconds[150] * 1e6:.0f}"


def _checksums() -> None:
    memory = np.random.default_rng(SEED).integers(0, 256, 128 * MIB, dtype=np.uint8)
    for size in (16 * 1024, MIB):
        rank = KvRank(planes=[KvPlane(0, size, size)], region_bytes=len(memory))
        checksums = BlockChecksums(memory, rank)
        cold = min(_seconds(partial(checksums.of, range(len(memory) // size))) for _ in range(3))
        warm = min(_seconds(partial(checksums.of, [3] * 8)) for _ in range(50))
        print(
            f"CRC-32C, blocks of {size // 1024} KiB: {len(memory) / cold / 1e9:.1f} GB/s from memory, "
            f"{8 * size / warm / 1e9:.1f} from the cache"
        )


def _best(ways: list[Callable[[], object]], rounds: int) -> list[float]:
    """The shortest of each, in turns."""
    times = [[_seconds(way) for way in ways] for _ in range(rounds)]
    return [min(column) for column in zip(*times, strict=True)]


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


if __name__ == "__main__":
    raise SystemExit(main())
