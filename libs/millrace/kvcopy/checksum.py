"""CRC-32C of KV blocks: one number per block, over its planes in order (docs/decisions/0040)."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.contracts.kv import KvRank
from millrace.kvcopy.memory import Bytes
from millrace.native import kvcopy


class BlockChecksums:
    """Checksums of one region's blocks; keep one per region."""

    def __init__(self, memory: Bytes, rank: KvRank) -> None:
        """Takes the region that ``rank.planes`` describes. Raises ValueError: a plane is malformed."""
        self._memory = memory
        self._native = kvcopy.Checksums([(plane.offset, plane.stride, plane.bytes) for plane in rank.planes])

    def of(self, blocks: Sequence[int]) -> list[int]:
        """One per block, in the order asked. Raises ValueError: a block lies outside the region."""
        return self._native.of(self._memory, blocks)
