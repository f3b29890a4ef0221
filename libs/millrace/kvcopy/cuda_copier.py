"""Reads a peer's KV from GPU to GPU on one host: IPC handles, peer copies in batches on a stream of their own.

The bytes go over NVLink where there is one, else over PCIe. Needs the compiled module and a driver; without either,
``why_not`` says what is missing. A source may tell of a block only when the step that filled it is complete on
its GPU; the target may launch kernels that read a block once ``advance`` returned True.

Whether the peer lives is known from a connection, as for shared memory: a page of shared memory is handed out for that
alone. What a process of this same machine exported cannot be mapped by itself: such a link uses the memory as it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec

from millrace.contracts.kv import CopierKind, KvRank
from millrace.kvcopy.copier_port import CopierError, CopyPlan
from millrace.kvcopy.handout import RegionServer, RemoteRegion
from millrace.kvcopy.memory import SharedRegion, check_bounds

#: Changes with the calls of the compiled module.
_INTERFACE = 1
#: Of this process, to know its own exports by.
_PROCESS = os.urandom(16)

try:
    from millrace_native import kvcopy_cuda as _module
except ImportError:
    _BUILT = False
else:
    _BUILT = _module.INTERFACE == _INTERFACE


def why_not() -> str:
    """Return what is missing for CUDA copies here; empty where they can be tried. Starts no context on a GPU."""
    if not _BUILT:
        return "not built: native/ found no CUDA headers with a static runtime (12.8 or later)"
    try:
        return "" if _module.devices() else "no GPU here"
    except RuntimeError as error:
        return str(error)


class CudaHandle(msgspec.Struct, frozen=True, array_like=True):
    """Connection data of one rank for CUDA copies, as bytes in ``KvRank.handles``.

    Attributes:
        ipc: Of the allocation that the region lies in.
        offset: Of the region in it.
        process: Random, of the process that exported it.
        address: In that process.
        incarnation: Of the page that is handed out at ``socket``.
        socket: Where the exporter answers as long as it lives.
    """

    ipc: bytes
    offset: int
    process: bytes
    address: int
    incarnation: bytes
    socket: str


class CudaCopier:
    """Copies between GPUs of one host."""

    kind = CopierKind.CUDA

    def __init__(self, *, address: int, region_bytes: int, device: int, socket: Path, runtime: Any = None) -> None:
        """Takes the GPU memory that the own KV lies in, one allocation of ``cudaMalloc`` or a part of it.

        ``socket`` is a path of its own; ``runtime`` stands in for the compiled module. Raises CopierError: CUDA is not
        available here.
        """
        if runtime is None and (why := why_not()):
            raise CopierError(f"no CUDA copies here: {why}")
        self._runtime = runtime or _module
        self._address, self._bytes, self._device = address, region_bytes, device
        self._socket = socket
        self._witness: SharedRegion | None = None
        self._server: RegionServer | None = None

    def offer(self, rank: KvRank) -> KvRank:
        """See Copier. Raises CopierError: the memory cannot be exported, or the socket cannot be made."""
        ipc, offset = _told(self._runtime.export_region, self._address, self._bytes, self._device)
        if self._server is None:
            self._witness = SharedRegion(1, name="millrace-kv-witness")
            self._server = RegionServer(self._witness, self._socket)
        handle = CudaHandle(ipc, offset, _PROCESS, self._address, self._server.incarnation, str(self._socket))
        handles = {**rank.handles, self.kind: msgspec.msgpack.encode(handle)}
        return msgspec.structs.replace(rank, device=self._device, region_bytes=self._bytes, handles=handles)

    def connect(self, peer: KvRank) -> CudaLink:
        """See Copier."""
        word = peer.handles.get(self.kind)
        if word is None:
            raise CopierError("the peer does not offer CUDA copies")
        try:
            handle = msgspec.msgpack.decode(word, type=CudaHandle)
        except msgspec.MsgspecError as error:
            raise CopierError(f"the peer's CUDA handle is malformed: {error}") from error
        witness = RemoteRegion(handle.socket, incarnation=handle.incarnation, size=1)
        try:
            mapping = self._map(handle, peer.region_bytes)
        except CopierError:
            witness.close()
            raise
        source = (mapping.address if mapping else handle.address, peer.region_bytes)
        return CudaLink(witness, mapping, copy=partial(self._start, source))

    def close(self) -> None:
        """See Copier. The GPU memory stays: the engine owns it."""
        if self._server is not None and self._witness is not None:
            self._server.close()
            self._witness.close()
            self._server = self._witness = None

    def _start(self, source: tuple[int, int], plan: CopyPlan) -> _module.Transfer:
        check_bounds(plan, source_bytes=source[1], target_bytes=self._bytes)
        columns = (plan.source.tolist(), plan.target.tolist(), plan.lengths.tolist())
        target = (self._address, self._bytes)
        transfer: _module.Transfer = _told(self._runtime.Transfer, *columns, *source, *target, self._device)
        return transfer

    def _map(self, handle: CudaHandle, region_bytes: int) -> _module.Mapping | None:
        if handle.process == _PROCESS:
            return None
        mapping: _module.Mapping = _told(self._runtime.Mapping, handle.ipc, handle.offset, region_bytes, self._device)
        return mapping


class CudaLink:
    """One peer's region, mapped for the own GPU."""

    def __init__(
        self,
        witness: RemoteRegion,
        mapping: _module.Mapping | None,
        *,
        copy: Callable[[CopyPlan], _module.Transfer],
    ) -> None:
        """Takes what starts a plan on the GPU; ``mapping`` is kept as long as the link."""
        self._witness, self._mapping, self._copy = witness, mapping, copy
        self._transfers: list[CudaTransfer] = []
        self._closed = False

    def begin(self, plan: CopyPlan) -> CudaTransfer:
        """See Link."""
        self.check()
        transfer = CudaTransfer(self, self._copy(plan))
        self._transfers = [*(known for known in self._transfers if not known.over), transfer]
        return transfer

    def close(self) -> None:
        """See Link. Transfers under way are cancelled: the memory is unmapped once nothing reads it."""
        for transfer in self._transfers:
            transfer.cancel()
        self._transfers.clear()
        self._witness.close()
        self._mapping = None
        self._closed = True

    def check(self) -> None:
        """Raises CopierError: the peer is gone, or this was closed."""
        if self._closed:
            raise CopierError("the link is closed")
        self._witness.check()


class CudaTransfer:
    """One read under way; ``bytes_max`` bounds what a call hands to the GPU. Safe to cancel from another thread."""

    def __init__(self, link: CudaLink, transfer: _module.Transfer) -> None:
        self._link, self._transfer = link, transfer
        self._lock = Lock()
        self._ended = False
        self.over = False  # finished, cancelled or failed

    @property
    def launches(self) -> int:
        """Batches handed to the GPU so far."""
        return self._transfer.launches

    def advance(self, bytes_max: int) -> bool:
        """See Transfer. Raises ValueError: ``bytes_max`` is below 1."""
        if bytes_max < 1:
            raise ValueError(f"bytes_max is {bytes_max}; a transfer that may copy nothing never ends")
        with self._lock:
            if self._ended:
                raise CopierError("the transfer was cancelled, or has failed before")
            try:
                self.over = _told(self._transfer.advance, bytes_max)
                self._link.check()
            except CopierError:
                self._end()
                raise
            return self.over

    def cancel(self) -> None:
        """See Transfer. Waits for at most two batches."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        self._ended = self.over = True
        self._transfer.cancel()


def _told(call: Any, *arguments: Any) -> Any:
    """Calls into the compiled module; its errors become the port's."""
    try:
        return call(*arguments)
    except (RuntimeError, ValueError) as error:
        raise CopierError(f"CUDA: {error}") from error
