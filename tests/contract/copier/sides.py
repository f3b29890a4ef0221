"""One end of a copy: memory of a known layout and the copier over it, made the same way in every process.

A further kind of copier is added to ``MAKERS``; the suite then holds for it.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from millrace.contracts.kv import CopierKind, KvPlane, KvRank
from millrace.kvcopy import nixl_agent
from millrace.kvcopy.copier_port import Copier, CopierError, CopyPlan
from millrace.kvcopy.memory import Bytes, SharedRegion
from millrace.kvcopy.nixl_copier import NixlCopier, NixlLink
from millrace.kvcopy.plan import Planner
from millrace.kvcopy.shared_memory_copier import SharedMemoryCopier

#: What connects in the background is ready when ``connect`` returns; only a failing test waits so long, seconds.
PATIENCE_S = 30.0
BLOCKS = 64
BLOCK_BYTES = 4096
PLANES = 4
REGION_BYTES = BLOCKS * BLOCK_BYTES * PLANES
#: Layer-major: each plane holds its blocks one behind the other.
LAYOUT = KvRank(
    planes=[KvPlane(index * BLOCKS * BLOCK_BYTES, BLOCK_BYTES, BLOCK_BYTES) for index in range(PLANES)],
    region_bytes=REGION_BYTES,
)


def plan(source: KvRank, source_blocks: list[int], target: KvRank, target_blocks: list[int]) -> CopyPlan:
    return Planner(source, target).plan(source_blocks, target_blocks)


class Side(NamedTuple):
    """Memory, the copier over it, and what peers are told."""

    memory: Bytes
    copier: Copier
    rank: KvRank

    def close(self) -> None:
        self.copier.close()


def shared_memory(folder: Path, name: str) -> tuple[Bytes, Copier]:
    region = SharedRegion(REGION_BYTES)
    return region.view, SharedMemoryCopier(region, folder / f"{name}.sock")


def nixl(folder: Path, name: str) -> tuple[Bytes, Copier]:
    memory = np.zeros(REGION_BYTES, dtype=np.uint8)
    return memory, WiredNixl(address=memory.ctypes.data, region_bytes=REGION_BYTES)


class WiredNixl(NixlCopier):
    """Connects, and waits until that is done."""

    def connect(self, peer: KvRank) -> NixlLink:
        link, give_up = super().connect(peer), time.monotonic() + PATIENCE_S
        try:
            while not link.ready() and time.monotonic() < give_up:
                time.sleep(0.0005)
        except CopierError:
            link.close()
            raise
        return link


MAKERS: dict[CopierKind, Callable[[Path, str], tuple[Bytes, Copier]]] = {
    CopierKind.SHARED_MEMORY: shared_memory,
    CopierKind.NIXL: nixl,
}

#: Kinds that are not everywhere.
WHY_NOT: dict[CopierKind, Callable[[], str]] = {CopierKind.NIXL: nixl_agent.why_not}


def make(kind: CopierKind, folder: Path, name: str, *, seed: int = 0) -> Side:
    """A side whose memory holds the bytes of ``seed``; zeros for 0."""
    memory, copier = MAKERS[kind](folder, name)
    if seed:
        memory[:REGION_BYTES] = pattern(seed)
    return Side(memory, copier, copier.offer(msgspec.structs.replace(LAYOUT)))


def pattern(seed: int) -> Bytes:
    """Return the content of a region with this seed."""
    return np.random.default_rng(seed).integers(1, 256, REGION_BYTES, dtype=np.uint8)
