"""The NIXL copier: reads over what UCX finds between two processes (cross-memory attach, InfiniBand, RoCE, TCP).

A link's states: *wiring* (a read of a few bytes into a scratch buffer is under way; it makes UCX's connection) →
*ready* → *broken* (peer gone, or a read could not be stopped) or closed. Connecting does not block, unless asked to:
reads of a link that is still wiring begin when it is ready.

Copies happen inside ``advance`` where both are on one host. Each call starts ``bytes_max`` of them at most, wherever
they happen, and a few requests are under way at once: NIXL does not tell who copies, and small ones are finished later
even on one host.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from millrace.contracts.kv import CopierKind, KvRank
from millrace.kvcopy.copier_port import CopierError, CopyPlan
from millrace.kvcopy.memory import check_bounds
from millrace.kvcopy.nixl_agent import NixlAgent, addresses
from millrace.kvcopy.pieces import Slices

#: Pieces of one request: NIXL allocates for each, and takes 3 µs to copy even the smallest.
PIECES_MAX = 4096
#: Requests of one transfer under way at once, where they are not over at once.
REQUESTS_MAX = 4
#: A wire-up takes 0.1 s between processes that tend to it; in one step of a slow engine it may take some more.
WIRING_S = 5.0
#: How long cancel waits for what is under way before it tears the connection down.
CANCEL_S = 0.2
#: Read by the wire-up: a page, so that its registration is one.
SCRATCH_BYTES = 4096
WIRE_UP_BYTES = 8


class NixlHandle(msgspec.Struct, frozen=True, array_like=True):
    """Connection data of one rank, as bytes in ``KvRank.handles``."""

    address: int
    device: int
    metadata: bytes


class NixlCopier:
    """Owns an agent, the region's registration (made once) and a thread; see Copier. One per process and region."""

    kind = CopierKind.NIXL

    def __init__(self, *, address: int, region_bytes: int, device: int = -1) -> None:
        """Registers ``region_bytes`` at ``address`` of this process (``device``: of that GPU; -1: of the host). They
        must stay mapped until ``close``. Raises CopierError: no NIXL here, or the memory cannot be registered.
        """
        self.address, self.region_bytes, self.device = address, region_bytes, device
        self.links: list[NixlLink] = []
        self._scratch = np.zeros(SCRATCH_BYTES, dtype=np.uint8)
        self.agent = NixlAgent(f"millrace-{os.getpid()}-{os.urandom(6).hex()}")
        try:
            self.agent.register(address=address, size=region_bytes, device=device)
            self.agent.register(address=self.scratch_address, size=SCRATCH_BYTES, device=-1)
        except CopierError:
            self.agent.close()
            raise
        self._closed = False

    @property
    def scratch_address(self) -> int:
        """Address that wire-ups read to."""
        return int(self._scratch.ctypes.data)

    def offer(self, rank: KvRank) -> KvRank:
        handle = NixlHandle(self.address, self.device, self.agent.metadata())
        return msgspec.structs.replace(rank, handles={**rank.handles, self.kind: msgspec.msgpack.encode(handle)})

    def connect(self, peer: KvRank) -> NixlLink:
        """See Copier. The link may still be wiring; one that never gets ready says so at its first transfer."""
        if self._closed:
            raise CopierError("the NIXL copier is closed")
        handle = _handle_of(peer)
        link = NixlLink(self, handle, peer_bytes=peer.region_bytes, forget=self._forget)
        self.links.append(link)
        return link

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for link in list(self.links):
            link.close()
        self.agent.close()

    def disconnect(self, peer: str, why: str) -> None:
        """Tears down a peer's connection: nothing is written to the own region after this. Its links are broken."""
        for link in self.links:
            if link.peer == peer:
                link.broken = link.broken or why
        self.agent.remove_peer(peer)

    def _forget(self, link: NixlLink) -> None:
        """The last link of a peer disconnects it."""
        self.links.remove(link)
        if not any(other.peer == link.peer for other in self.links):
            self.agent.remove_peer(link.peer)


def _handle_of(peer: KvRank) -> NixlHandle:
    raw = peer.handles.get(CopierKind.NIXL)
    if not raw:
        raise CopierError("the peer does not offer NIXL")
    try:
        return msgspec.msgpack.decode(raw, type=NixlHandle)
    except msgspec.DecodeError as wrong:
        raise CopierError(f"the peer's NIXL handle cannot be read: {wrong}") from wrong


class NixlLink:
    """See Link. Several transfers may share it.

    Attributes:
        broken: Why nothing can be read any more; empty while it can.
    """

    def __init__(
        self, copier: NixlCopier, handle: NixlHandle, *, peer_bytes: int, forget: Callable[[NixlLink], None]
    ) -> None:
        self.copier, self.handle, self.peer_bytes = copier, handle, peer_bytes
        self.broken = ""
        self._forget = forget
        self._agent = copier.agent
        self._transfers: set[NixlTransfer] = set()
        self.peer = self._agent.add_peer(handle.metadata)
        self._wiring_until = time.monotonic() + WIRING_S
        self._wiring: Any = None
        try:
            self._begin_wiring()
        except CopierError:
            self._agent.remove_peer(self.peer)
            raise

    def begin(self, plan: CopyPlan) -> NixlTransfer:
        self.check()
        if not self._agent.knows(self.peer):
            self.disconnect("the peer has gone")
            self.check()
        check_bounds(plan, source_bytes=self.peer_bytes, target_bytes=self.copier.region_bytes)
        transfer = NixlTransfer(self, plan, forget=self._transfers.discard)
        self._transfers.add(transfer)
        return transfer

    def close(self) -> None:
        if self.broken == "closed":
            return
        for transfer in list(self._transfers):
            transfer.cancel()
        self._drop_wiring()
        self.broken = "closed"
        self._forget(self)

    def ready(self) -> bool:
        """Whether it is wired; makes progress. Raises CopierError: it is broken, or was not wired in time."""
        self.check()
        if self._wiring is None:
            return True
        if self._agent.look(self._wiring) == "DONE":
            self._drop_wiring()
            return True
        if time.monotonic() > self._wiring_until:
            self.disconnect(f"the peer did not connect within {WIRING_S:g} s")
            self.check()
        return False

    def check(self) -> None:
        if self.broken:
            raise CopierError(f"the NIXL link is broken: {self.broken}")

    def disconnect(self, why: str) -> None:
        self._drop_wiring()
        self.copier.disconnect(self.peer, why)

    def make_read(self, part: CopyPlan) -> Any:
        source, target = addresses(part, source=self.handle.address, target=self.copier.address)
        devices = (self.handle.device, self.copier.device)
        return self._agent.make_read(self.peer, source=source, target=target, lengths=part.lengths, devices=devices)

    def _begin_wiring(self) -> None:
        self._agent.connect(self.peer)
        size = min(WIRE_UP_BYTES, self.peer_bytes)
        self._wiring = self._agent.make_read(
            self.peer,
            source=np.array([self.handle.address]),
            target=np.array([self.copier.scratch_address]),
            lengths=np.array([size]),
            devices=(self.handle.device, -1),
        )
        if self._agent.post(self._wiring) == "DONE":
            self._drop_wiring()

    def _drop_wiring(self) -> None:
        wiring, self._wiring = self._wiring, None
        if wiring is not None:
            _release(self._agent, wiring)


class NixlTransfer:
    """See Transfer."""

    def __init__(self, link: NixlLink, plan: CopyPlan, *, forget: Callable[[NixlTransfer], None]) -> None:
        self._link, self._agent = link, link.copier.agent
        self._slices = Slices(plan)
        self._under_way: deque[Any] = deque()
        self._forget = forget
        self._over = False
        self._done = False

    def advance(self, bytes_max: int) -> bool:
        if bytes_max < 1:
            raise ValueError(f"bytes_max is {bytes_max}; a transfer that may copy nothing never ends")
        with self._agent.lock:  # a cancel from another thread comes before or after
            if self._done:
                return True
            if self._over:
                raise CopierError("the transfer was cancelled, or has failed before")
            try:
                return self._advance(bytes_max)
            except CopierError as failure:
                self._link.broken = self._link.broken or str(failure)
                self.cancel()
                raise

    def cancel(self) -> None:
        with self._agent.lock:
            self._cancel()

    def _cancel(self) -> None:
        self._over = True
        self._forget(self)
        give_up = time.monotonic() + CANCEL_S
        while self._under_way and not self._link.broken and time.monotonic() < give_up:
            try:
                self._collect()
            except CopierError:
                break
        if self._under_way:
            self._link.disconnect(self._link.broken or "a read could not be stopped in time")
            while self._under_way:
                _release(self._agent, self._under_way.popleft())

    def _advance(self, bytes_max: int) -> bool:
        if not self._link.ready():
            return False
        self._collect()
        left = bytes_max
        while left > 0 and self._slices.left and len(self._under_way) < REQUESTS_MAX:
            part = self._slices.take(bytes_max=left, pieces_max=PIECES_MAX)
            left -= part.bytes
            self._post(part)
        if self._slices.left or self._under_way:
            return False
        self._done = self._over = True
        self._forget(self)
        return True

    def _post(self, part: CopyPlan) -> None:
        request = self._link.make_read(part)
        self._under_way.append(request)
        if self._agent.post(request) == "DONE":
            self._under_way.pop()
            self._agent.release(request)

    def _collect(self) -> None:
        while self._under_way and self._agent.look(self._under_way[0]) == "DONE":
            self._agent.release(self._under_way.popleft())


def _release(agent: NixlAgent, request: Any) -> None:
    """Gives up a request of a connection that is torn down; NIXL frees with the agent what it cannot free now."""
    try:
        agent.release(request)
    except CopierError:
        pass
