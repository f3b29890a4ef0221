"""A GPU allocation as a dma-buf, which an RDMA device can read and write directly (GPUDirect). Not run yet: no machine
of this project has both a GPU and an RDMA device.
"""

from __future__ import annotations

import ctypes
import mmap

import msgspec

_DMA_BUF_FD = 0x1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD


class Exported(msgspec.Struct, frozen=True):
    """An exported range. The receiver closes ``fd``; the region begins ``offset`` bytes into it."""

    fd: int
    offset: int


def export_dmabuf(address: int, size: int) -> Exported | None:
    """The memory at ``address`` of the current CUDA context's GPU; None where the driver exports none.

    The driver wants whole pages of the host, so the range is widened to them.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        export = driver.cuMemGetHandleForAddressRange
    except (OSError, AttributeError):
        return None
    offset = address % mmap.PAGESIZE
    whole = -(-(offset + size) // mmap.PAGESIZE) * mmap.PAGESIZE
    fd = ctypes.c_int(-1)
    start = ctypes.c_uint64(address - offset)
    status = export(ctypes.byref(fd), start, ctypes.c_size_t(whole), _DMA_BUF_FD, ctypes.c_uint64(0))
    return Exported(fd.value, offset) if status == 0 and fd.value >= 0 else None
