"""Stands in for ``millrace_native.kvcopy_cuda``: GPU memory is host memory, mapped by reading the exporting process."""

from __future__ import annotations

import ctypes
import os
import struct

import numpy as np

_IPC = struct.Struct("<qQ")

#: Exporting process of each address mapped, as a GPU's page tables know it.
_owners: dict[int, int] = {}


def export_region(address: int, bytes_: int, device: int) -> tuple[bytes, int]:
    """Handle of the allocation, and the region's offset in it."""
    return _IPC.pack(os.getpid(), address).ljust(64, b"\0"), 0


class Mapping:
    """A peer's memory."""

    def __init__(self, ipc: bytes, offset: int, bytes_: int, device: int) -> None:
        process, base = _IPC.unpack_from(ipc)
        self.address = base + offset
        _owners[self.address] = process


class Transfer:
    """Copies when it is asked, as much as it may."""

    def __init__(self, source: list[int], target: list[int], lengths: list[int], *regions: int) -> None:
        self._plan = [np.array(column, dtype=np.int64) for column in (source, target, lengths)]
        self._source, here, size = regions[:2], regions[2], regions[3]
        self._process = _owners.get(regions[0], os.getpid())
        self._target = np.frombuffer((ctypes.c_uint8 * size).from_address(here), dtype=np.uint8)
        self._position = (0, 0)
        self.launches = 0

    def advance(self, bytes_max: int) -> bool:
        self.launches += 1
        try:
            with open(f"/proc/{self._process}/mem", "rb", buffering=0) as memory:
                self._position = self._copied(memory.fileno(), bytes_max)
        except OSError as error:
            raise RuntimeError(str(error)) from None
        return self._position == (len(self._plan[0]), 0)

    def _copied(self, memory: int, bytes_max: int) -> tuple[int, int]:
        piece, done = self._position
        while piece < len(self._plan[0]) and bytes_max > 0:
            source, target, length = (int(column[piece]) for column in self._plan)
            count = min(length - done, bytes_max)
            here = self._target[target + done :][:count]
            assert os.preadv(memory, [memoryview(here)], self._source[0] + source + done) == count
            bytes_max -= count
            piece, done = (piece, done + count) if done + count < length else (piece + 1, 0)
        return piece, done

    def cancel(self) -> None: ...
