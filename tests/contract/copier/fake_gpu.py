"""Stands in for ``millrace_native.kvcopy_cuda``: GPU memory is host memory, mapped by reading the exporting process."""

from __future__ import annotations

import ctypes
import os
import struct

import numpy as np
from millrace.native import kvcopy

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
        piece, done, error = kvcopy.read_pieces(
            *self._plan, self._process, *self._source, self._target, self._position, bytes_max
        )
        self._position = (piece, done)
        self.launches += 1
        if error:
            raise RuntimeError(os.strerror(error))
        return self._position == (len(self._plan[0]), 0)

    def cancel(self) -> None: ...
