"""CRC-32C of KV blocks: one number per block, over its planes in order.

The compiled one is used where it is built; the one here gives the same numbers with numpy alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from millrace.contracts.kv import KvPlane, KvRank
from millrace.kvcopy import native
from millrace.kvcopy.memory import Bytes

#: Castagnoli's polynomial, bits reversed.
_POLYNOMIAL = 0x82F63B78
_ONES = 0xFFFFFFFF
#: Bytes that one lane takes step by step; lanes are then joined two by two.
_LANE_BYTES = 32

_Words = npt.NDArray[np.uint32]


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
    """CRC-32C, by numpy.

    The data is cut into lanes that are taken through the table side by side; a register that starts at zero is not
    changed by leading zeros, so the first lane may be padded. Two neighbours join as shift(left, length of right) ^
    right.
    """
    lanes = -(-len(data) // _LANE_BYTES)
    padded = np.zeros(lanes * _LANE_BYTES, dtype=np.uint8)
    padded[len(padded) - len(data) :] = data
    columns = padded.reshape(lanes, _LANE_BYTES).T
    registers = np.zeros(lanes, dtype=np.uint32)
    for column in columns:
        registers = _TABLE[(registers ^ column) & 0xFF] ^ (registers >> 8)
    register = _joined(registers) ^ int(_shift(np.array([_ONES], np.uint32), len(data))[0])
    return register ^ _ONES


def _joined(registers: _Words) -> int:
    length = _LANE_BYTES
    while len(registers) > 1:
        if len(registers) % 2:
            registers = np.concatenate([np.zeros(1, np.uint32), registers])
        registers = _apply(_zeros(length), registers[0::2]) ^ registers[1::2]
        length *= 2
    return int(registers[0]) if len(registers) else 0


def _shift(registers: _Words, length: int) -> _Words:
    """What the registers are after so many zero bytes."""
    bit = 0
    while length >> bit:
        if length >> bit & 1:
            registers = _apply(_zeros(1 << bit), registers)
        bit += 1
    return registers


def _apply(operator: _Words, registers: _Words) -> _Words:
    """A linear operator, given as its values of each byte at each place, shape (4, 256)."""
    shifted: _Words = operator[0][registers & 0xFF] ^ operator[1][registers >> 8 & 0xFF]
    shifted ^= operator[2][registers >> 16 & 0xFF] ^ operator[3][registers >> 24]
    return shifted


@lru_cache(maxsize=64)
def _zeros(length: int) -> _Words:
    """The operator of ``length`` zero bytes, a power of two."""
    places = np.arange(256, dtype=np.uint32)[None, :] << (8 * np.arange(4, dtype=np.uint32))[:, None]
    if length == 1:
        one: _Words = _TABLE[places & 0xFF] ^ (places >> 8)
        return one
    half = _zeros(length // 2)
    return _apply(half, _apply(half, places))


def _table() -> _Words:
    registers = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        registers = np.where(registers & 1, registers >> 1 ^ _POLYNOMIAL, registers >> 1).astype(np.uint32)
    return registers


_TABLE = _table()
