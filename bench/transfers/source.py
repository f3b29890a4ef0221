"""A source in a process of its own, which offers its region by shared memory, cross-memory attach and NIXL.

``python -m bench.transfers.source SOCKET``: prints its KvRank as hex, serves until its input ends.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
from millrace.kvcopy import nixl_agent
from millrace.kvcopy.copier_port import Copier
from millrace.kvcopy.cross_memory_copier import CrossMemoryCopier
from millrace.kvcopy.memory import SharedRegion
from millrace.kvcopy.nixl_copier import NixlCopier
from millrace.kvcopy.shared_memory_copier import SharedMemoryCopier

from bench.transfers.shape import REGION_BYTES, fill, layout


def copiers(region: SharedRegion, socket: Path) -> list[Copier]:
    """All that can be used here."""
    found: list[Copier] = [SharedMemoryCopier(region, socket), CrossMemoryCopier(region.view)]
    if not nixl_agent.why_not():
        found.append(NixlCopier(address=region.address, region_bytes=region.size, connect_wait_s=5.0))
    return found


def main(socket: str) -> None:
    """Offers and waits."""
    region = SharedRegion(REGION_BYTES)
    fill(region.view)
    rank = layout(block_major=False)
    offered = copiers(region, Path(socket))
    for copier in offered:
        rank = copier.offer(rank)
    print(msgspec.msgpack.encode(rank).hex(), flush=True)
    sys.stdin.read()
    for copier in offered:
        copier.close()


if __name__ == "__main__":
    main(sys.argv[1])
