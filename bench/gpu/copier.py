"""Bandwidth of the CUDA copier between two processes on one GPU, 1 to 10,000 pieces, beside a copy on the device.

    python -m bench.gpu.copier --mib 256

A child owns the source's memory, this process reads it through an IPC handle. Each figure is the best of the rounds; a
device copy reads and writes the same bytes in one piece within this process. What arrived is compared with what was
sent. Not run on a GPU so far.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
from millrace.contracts.kv import KvPlane, KvRank
from millrace.kvcopy.cuda_copier import CudaCopier, why_not

from bench.kvcopy import MIB, PAGE, carry_out, shuffled

PIECES = (1, 10, 100, 1_000, 10_000)
FILLED = 3


def main() -> int:
    """Prints the table; 1 where what arrived differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="MiB of each transfer, 40 or more")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    if why := why_not():
        print(f"skipped: {why}")
        return 0
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        child = context.Process(target=_own, args=(there, Path(folder), 2 * options.mib * MIB), daemon=True)
        child.start()
        try:
            peer: KvRank = msgspec.msgpack.decode(here.recv_bytes(), type=KvRank)
            return _measured(peer, Path(folder), bytes_=options.mib * MIB, rounds=options.rounds)
        finally:
            here.send_bytes(b"end")
            child.join()


def _measured(peer: KvRank, folder: Path, *, bytes_: int, rounds: int) -> int:
    import torch

    memory = torch.zeros(2 * bytes_, dtype=torch.uint8, device="cuda")
    other = torch.ones(bytes_, dtype=torch.uint8, device="cuda")
    copier = CudaCopier(address=memory.data_ptr(), region_bytes=memory.numel(), device=0, socket=folder / "target")
    link = copier.connect(peer)
    differing = 0
    print(f"{torch.cuda.get_device_name(0)}, {rounds} rounds, {bytes_ // MIB} MiB; GB/s (share of a device copy)")
    for pieces in PIECES:
        plan = shuffled(pieces, bytes_)
        memory.zero_()
        torch.cuda.synchronize()
        copied = plan.bytes / _best(partial(carry_out, link, plan), rounds) / 1e9
        differing += int((memory == FILLED).sum()) != plan.bytes
        device = plan.bytes / _best(partial(_device_copy, memory, other, plan.bytes), rounds) / 1e9
        length = int(plan.lengths[0]) // 1024
        print(f"{pieces:>7} of {length:>8} KiB {copied:>9.1f} ({copied / device:4.0%}) device copy {device:>9.1f}")
    link.close()
    copier.close()
    if differing:
        print(f"in {differing} rows what arrived is not what was sent")
    return int(bool(differing))


def _own(pipe: Connection, folder: Path, bytes_: int) -> None:
    """The other process."""
    import torch

    memory = torch.full((bytes_,), FILLED, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    copier = CudaCopier(address=memory.data_ptr(), region_bytes=bytes_, device=0, socket=folder / "source")
    rank = copier.offer(KvRank(planes=[KvPlane(0, PAGE, PAGE)], region_bytes=bytes_))
    pipe.send_bytes(msgspec.msgpack.encode(rank))
    pipe.recv_bytes()
    copier.close()


def _device_copy(memory: Any, other: Any, bytes_: int) -> None:
    import torch

    memory[:bytes_].copy_(other[:bytes_])
    torch.cuda.synchronize()


def _best(call: Callable[[], None], rounds: int) -> float:
    """Least of its times, seconds."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


if __name__ == "__main__":
    sys.exit(main())
