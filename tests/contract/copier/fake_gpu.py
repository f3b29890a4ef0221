"""Stands in for ``millrace_native.kvcopy_cuda``: GPU memory is host memory, mapped by reading the exporting process."""

from __future__ import annotations

import ctypes
import os
import struct

import numpy as np
from millrace.kvcopy.copier_port import CopyPlan
from millrace.kvcopy.cross_memory_copier import read_pieces

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
        columns = [np.array(column, dtype=np.int64) for column in (source, target, lengths)]
        self._plan = CopyPlan(source=columns[0], target=columns[1], lengths=columns[2])
        self._source, here, size = regions[:2], regions[2], regions[3]
        self._process = _owners.get(regions[0], os.getpid())
        self._target = np.frombuffer((ctypes.c_uint8 * size).from_address(here), dtype=np.uint8)
        self._position = (0, 0)
        self.launches = 0

    def advance(self, bytes_max: int) -> bool:
        self._position, error = read_pieces(
            self._plan,
            process=self._process,
            region=self._source,
            target=self._target,
            position=self._position,
            bytes_max=bytes_max,
        )
        self.launches += 1
        if error:
            raise RuntimeError(os.strerror(error))
        return self._position == (self._plan.descriptors, 0)

    def cancel(self) -> None: ...
