"""Reads a peer's KV through shared memory: its cache lies in a memfd, which this process maps read-only. One host."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec

from millrace.contracts.kv import CopierKind, KvRank
from millrace.kvcopy.copier_port import CopierError, CopyPlan
from millrace.kvcopy.handout import RegionServer, RemoteRegion
from millrace.kvcopy.memory import Bytes, Position, SharedRegion, SteppedTransfer, check_bounds
from millrace.native import kvcopy


class SharedMemoryCopier:
    """Copies from mapped memfds, with the caller's processor."""

    kind = CopierKind.SHARED_MEMORY

    def __init__(self, region: SharedRegion, socket: Path) -> None:
        """Takes the region that the own KV lies in; it is handed out at ``socket`` once it is offered."""
        self._region, self._socket = region, socket
        self._server: RegionServer | None = None

    def offer(self, rank: KvRank) -> KvRank:
        if self._server is None:
            self._server = RegionServer(self._region, self._socket)
        handles = {**rank.handles, self.kind: self._server.incarnation}
        return msgspec.structs.replace(rank, socket=str(self._socket), handles=handles, region_bytes=self._region.size)

    def connect(self, peer: KvRank) -> SharedMemoryLink:
        incarnation = peer.handles.get(self.kind)
        if not peer.socket or incarnation is None:
            raise CopierError("the peer does not offer shared memory")
        remote = RemoteRegion(peer.socket, incarnation=incarnation, size=peer.region_bytes)
        return SharedMemoryLink(remote, self._region.view)

    def close(self) -> None:
        """See Copier. The region itself stays open: the engine owns it."""
        if self._server is not None:
            self._server.close()
            self._server = None


class SharedMemoryLink:
    """One peer's region, mapped."""

    def __init__(self, remote: RemoteRegion, target: Bytes) -> None:
        self._remote, self._target = remote, target

    def begin(self, plan: CopyPlan) -> SteppedTransfer:
        self._remote.check()
        source = self._remote.memory
        check_bounds(plan, source_bytes=len(source), target_bytes=len(self._target))
        copy = partial(copy_pieces, plan, source, self._target)
        return SteppedTransfer(plan.descriptors, copy=copy, check=self._remote.check)

    def close(self) -> None:
        """See Link. Transfers under way fail at their next advance."""
        self._remote.close()


def copy_pieces(plan: CopyPlan, source: Bytes, target: Bytes, position: Position, bytes_max: int) -> Position:
    """Goes on from ``position`` (piece, bytes of it done) for at most ``bytes_max``; returns the position reached.

    Raises ValueError: a piece or the position lies outside. Does not hold the interpreter's lock.
    """
    return kvcopy.copy_pieces(plan.source, plan.target, plan.lengths, source, target, position, bytes_max)
