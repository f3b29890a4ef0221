"""Reads a peer's KV straight out of its memory (process_vm_readv). One host, and only where ptrace is permitted.

A process id may come to name another process: by reuse, or because the peer lives in another pid namespace. So a rank
offered this way tells where a random incarnation lies in its memory, which is read and compared at connect, at begin
and after each step of a transfer.
"""

from __future__ import annotations

import errno
import os
import struct
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from millrace.contracts.kv import CopierKind, KvRank
from millrace.kvcopy.copier_port import CopierError, CopyPlan
from millrace.kvcopy.memory import Bytes, Position, SteppedTransfer, address_of, check_bounds
from millrace.native import kvcopy

_HANDLE = struct.Struct("<Q16s")
_INCARNATION_BYTES = 16
#: The incarnation at the beginning of its region.
_WITNESS = CopyPlan(source=np.zeros(1, np.int64), target=np.zeros(1, np.int64), lengths=np.array([_INCARNATION_BYTES]))
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


class CrossMemoryCopier:
    """Copies out of other processes' memory, with the caller's processor."""

    kind = CopierKind.CROSS_MEMORY

    def __init__(self, memory: Bytes) -> None:
        """Takes the memory that the own KV lies in, writable, shape (bytes,)."""
        self._memory = memory
        self._incarnation = np.frombuffer(bytearray(os.urandom(_INCARNATION_BYTES)), dtype=np.uint8)

    def offer(self, rank: KvRank) -> KvRank:
        """See Copier."""
        handle = _HANDLE.pack(address_of(self._incarnation), self._incarnation.tobytes())
        return msgspec.structs.replace(
            rank,
            pid=os.getpid(),
            address=address_of(self._memory),
            region_bytes=len(self._memory),
            handles={**rank.handles, self.kind: handle},
        )

    def connect(self, peer: KvRank) -> CrossMemoryLink:
        """See Copier."""
        handle = peer.handles.get(self.kind, b"")
        if not peer.address or len(handle) != _HANDLE.size:
            raise CopierError("the peer does not offer cross-memory attach")
        link = CrossMemoryLink(peer, *_HANDLE.unpack(handle), target=self._memory)
        link.check()
        return link

    def close(self) -> None:
        """See Copier. Peers that read on notice that the incarnation is gone."""
        self._incarnation.fill(0)


class CrossMemoryLink:
    """One peer's process."""

    def __init__(self, peer: KvRank, witness: int, incarnation: bytes, *, target: Bytes) -> None:
        """Takes the address where ``incarnation`` must lie in the peer's memory."""
        self._pid, self._region = peer.pid, (peer.address, peer.region_bytes)
        self._witness, self._incarnation = witness, incarnation
        self._target = target
        self._closed = False

    def begin(self, plan: CopyPlan) -> SteppedTransfer:
        """See Link."""
        self.check()
        check_bounds(plan, source_bytes=self._region[1], target_bytes=len(self._target))
        return SteppedTransfer(plan.descriptors, copy=partial(self._copy, plan), check=self.check)

    def close(self) -> None:
        """See Link. Transfers under way fail at their next advance."""
        self._closed = True

    def check(self) -> None:
        """Raises CopierError: closed, or the process is not there or not the one that made the offer."""
        if self._closed:
            raise CopierError("the link is closed")
        found = np.zeros(_INCARNATION_BYTES, dtype=np.uint8)
        self._read(_WITNESS, (self._witness, len(found)), found, (0, 0), len(found))
        if found.tobytes() != self._incarnation:
            raise CopierError(f"process {self._pid} here is not the peer: it has gone, or has its own pid namespace")

    def _copy(self, plan: CopyPlan, position: Position, bytes_max: int) -> Position:
        return self._read(plan, self._region, self._target, position, bytes_max)

    def _read(
        self, plan: CopyPlan, region: tuple[int, int], target: Bytes, position: Position, bytes_max: int
    ) -> Position:
        """Goes on from ``position`` in the peer's memory at (address, bytes). Raises CopierError."""
        piece, done, error = kvcopy.read_pieces(
            plan.source, plan.target, plan.lengths, self._pid, *region, target, position, bytes_max
        )
        _raise_for(error, self._pid)
        return piece, done


def _raise_for(error: int, process: int) -> None:
    """Raises CopierError with what to do about it, unless ``error`` is 0."""
    if not error:
        return
    if error in (errno.EPERM, errno.EACCES):
        scope = _PTRACE_SCOPE.read_text().strip() if _PTRACE_SCOPE.exists() else "none"
        raise CopierError(
            f"reading process {process} is not permitted (yama ptrace_scope: {scope}): both need the same user, and "
            "either kernel.yama.ptrace_scope = 0 or CAP_SYS_PTRACE (containers: cap_add SYS_PTRACE)"
        )
    if error == errno.ESRCH:
        raise CopierError(
            f"there is no process {process}: it has ended, or has its own pid namespace (containers: pid: host)"
        )
    if error == errno.EFAULT:
        raise CopierError(f"process {process} does not have the memory that it offered")
    raise CopierError(f"reading process {process} failed: {os.strerror(error)}")
