"""Memory that copiers read and write: views of bytes, the memfd that a KV cache lies in, transfers in steps."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable
from threading import Lock

import numpy as np
import numpy.typing as npt

from millrace.kvcopy.copier_port import CopierError, CopyPlan

Bytes = npt.NDArray[np.uint8]
#: How far a copy has come: pieces done, and bytes of the next one.
Position = tuple[int, int]

#: Linux 5.1: no new mapping is writable; mappings made before stay as they are. Python 3.11 does not name it.
_F_SEAL_FUTURE_WRITE = 0x10
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class SharedRegion:
    """A memfd of fixed size, mapped once, that other processes may map read-only.

    The size is sealed: a reader can never be killed because the region shrank under it. Whoever keeps a view (a torch
    tensor on ``view``) keeps the mapping alive; ``close`` only gives up this object's share of it.

    Attributes:
        view: All of it, writable, shape (size,); zero at first. ``torch.frombuffer(region.view, dtype=...)`` works.
        size: Bytes.
        address: Where ``view`` begins in this process.
    """

    def __init__(self, size: int) -> None:
        """Makes one of ``size`` bytes, rounded up to whole pages. Raises OSError: no memory, or no memfd here."""
        self.size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self._fd = os.memfd_create("millrace-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, self.size)
            self.view: Bytes = np.frombuffer(mmap.mmap(self._fd, self.size), dtype=np.uint8)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SIZE_SEALS)
            self._seal_writing()
        except BaseException:
            os.close(self._fd)
            raise
        self.address = address_of(self.view)

    @property
    def fd(self) -> int:
        """The memfd, owned by this object. Raises CopierError: closed."""
        if self._fd < 0:
            raise CopierError("the shared region is closed")
        return self._fd

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _seal_writing(self) -> None:
        try:
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
        except OSError:  # an older kernel: peers are trusted not to write
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)


def map_sealed(fd: int, size: int) -> Bytes:
    """Maps a peer's region read-only; the caller keeps owning ``fd``.

    Raises CopierError: it is not a memfd, is smaller than announced, or could shrink (reading it then could kill us).
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as failure:
        raise CopierError("the peer handed out something that is no memfd") from failure
    if seals & _SIZE_SEALS != _SIZE_SEALS:
        raise CopierError("the peer's memfd may shrink while it is read: its size is not sealed")
    actual = os.fstat(fd).st_size
    if actual < size or size < 1:
        raise CopierError(f"the peer's region has {actual} bytes, not the {size} that it announced")
    try:
        return np.frombuffer(mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ), dtype=np.uint8)
    except (OSError, ValueError) as failure:
        raise CopierError(f"the peer's region cannot be mapped: {failure}") from failure


def address_of(memory: Bytes) -> int:
    """Return the start address of ``memory`` in this process."""
    return int(memory.__array_interface__["data"][0])


def check_bounds(plan: CopyPlan, *, source_bytes: int, target_bytes: int) -> None:
    """Raises CopierError: a piece is empty, or lies outside its region."""
    for side, offsets, size in (("source", plan.source, source_bytes), ("target", plan.target, target_bytes)):
        if len(offsets) != len(plan.lengths):
            raise CopierError(f"the plan has {len(offsets)} {side} offsets for {len(plan.lengths)} lengths")
        # Compared this way round, no sum can overflow.
        if np.any((offsets < 0) | (plan.lengths < 1) | (plan.lengths > size) | (offsets > size - plan.lengths)):
            raise CopierError(f"the plan reaches outside the {side}'s region of {size} bytes")


class SteppedTransfer:
    """Copies a plan piece by piece with the caller's processor. Safe to cancel from another thread."""

    def __init__(self, pieces: int, *, copy: Callable[[Position, int], Position], check: Callable[[], None]) -> None:
        """Takes what goes on from a position for at most so many bytes, and what raises CopierError when the source is
        no longer to be trusted.
        """
        self._copy, self._check = copy, check
        self._end: Position = (pieces, 0)
        self._position: Position = (0, 0)
        self._over = False
        self._lock = Lock()

    def advance(self, bytes_max: int) -> bool:
        if bytes_max < 1:
            raise ValueError(f"bytes_max is {bytes_max}; a transfer that may copy nothing never ends")
        with self._lock:
            if self._over:
                raise CopierError("the transfer was cancelled, or has failed before")
            try:
                if self._position != self._end:
                    self._position = self._copy(self._position, bytes_max)
                self._check()  # after the bytes: it says that their owner was there until they were read
            except BaseException:
                self._over = True
                raise
            return self._position == self._end

    def cancel(self) -> None:
        with self._lock:
            self._over = True
