"""CRC-32C of KV blocks: one number per block, over its planes in order.

The compiled one is used where it is built: it takes a block's planes where they lie. The library gives the same numbers
for copies of them (docs/decisions/0040).
"""

from __future__ import annotations

from collections.abc import Sequence

import google_crc32c
import numpy as np

from millrace.contracts.kv import KvPlane, KvRank
from millrace.kvcopy import native
from millrace.kvcopy.memory import Bytes


class BlockChecksums:
    """Checksums of one region's blocks; keep one per region."""

    def __init__(self, memory: Bytes, rank: KvRank, *, compiled: bool = native.AVAILABLE) -> None:
        """Takes the region that ``rank.planes`` describes. Raises ValueError: a plane is malformed."""
        self._memory, self._planes = memory, list(rank.planes)
        self._native = native.checksums(self._planes) if compiled else None

    def of(self, blocks: Sequence[int]) -> list[int]:
        """One per block, in the order asked. Raises ValueError: a block lies outside the region."""
        if self._native is not None:
            return self._native.of(self._memory, blocks)
        return [self._of_block(block) for block in blocks]

    def _of_block(self, block: int) -> int:
        return crc32c(np.concatenate([self._bytes(plane, block) for plane in self._planes] or [self._memory[:0]]))

    def _bytes(self, plane: KvPlane, block: int) -> Bytes:
        start = plane.offset + block * plane.stride
        if block < 0 or start + plane.bytes > len(self._memory):
            raise ValueError(f"block {block} lies outside the region of {len(self._memory)} bytes")
        return self._memory[start : start + plane.bytes]


def checksums(memory: Bytes, rank: KvRank, blocks: Sequence[int]) -> list[int]:
    """Checksums of some blocks once; see BlockChecksums for many."""
    return BlockChecksums(memory, rank).of(blocks)


def crc32c(data: Bytes) -> int:
    """CRC-32C of bytes in one piece."""
    return int(google_crc32c.value(data.tobytes()))
