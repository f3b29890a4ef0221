"""The RDMA copier: READs over one reliable connection per peer, moved by the network cards alone.

A link's states: *connecting* (a thread introduces itself to the source's listener, so that the caller never waits) →
*ready* → *broken* (peer gone, a READ failed or could not be stopped in time) or closed. After broken, connect again.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from millrace.contracts.kv import CopierKind, KvRank
from millrace.kvcopy.copier import CopierError, CopyPlan
from millrace.kvcopy.memory import check_bounds
from millrace.kvcopy.pieces import cut
from millrace.kvcopy.verbs_device import OpenDevice, address_of, guarded, join
from millrace.kvcopy.verbs_listener import VerbsListener, introduce

#: READs under way per link: enough to keep 400 Gb/s busy with pieces of 16 KiB over 20 µs.
DEPTH = 256
#: Of one READ. What is under way bounds how long a cancel may take: 256 MiB are 10 ms at 200 Gb/s.
PIECE_BYTES_MAX = 1 << 20
#: 4.096 µs * 2^14 = 67 ms without an answer, seven times: a host that vanished is noticed in half a second.
PACKET_TIMEOUT = 14
CONNECT_S = 2.0
#: How long ``connect`` waits for the introduction: one that fails or succeeds at once does so within a round trip.
CONNECT_WAIT_S = 0.02
#: How long cancel waits for what is under way before it tears the connection down.
CANCEL_S = 0.2
TOKEN_BYTES = 16


class VerbsHandle(msgspec.Struct, frozen=True, array_like=True):
    """Connection data of one rank, as bytes in ``KvRank.handles``."""

    address: int
    remote_key: int
    host: str
    port: int
    token: bytes


class VerbsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """RDMA settings of a copier.

    Attributes:
        device: Name, such as ``mlx5_0``; empty for the first with an active port.
        gid_index: Of the port's address table; -1: RoCE v2 with IPv4 before others.
        listen: Address for introductions; empty for all.
        host: What peers connect to; empty: the RDMA port's own IPv4 address, else this host's name.
    """

    device: str = ""
    gid_index: int = -1
    listen: str = ""
    host: str = ""


class VerbsCopier:
    """Owns the device, the region's registration (made once), a listener and its thread; see Copier."""

    kind = CopierKind.VERBS

    def __init__(
        self,
        *,
        address: int,
        region_bytes: int,
        device: int = -1,
        settings: VerbsSettings | None = None,
        connect_wait_s: float = CONNECT_WAIT_S,
    ) -> None:
        """Registers ``region_bytes`` at ``address`` of this process (``device``: of that GPU; -1: of the host). They
        must stay mapped until ``close``. ``connect`` waits up to ``connect_wait_s`` for a link to be ready.
        Raises CopierError: no RDMA here, or the memory cannot be registered.
        """
        self._connect_wait_s = connect_wait_s
        chosen = settings or VerbsSettings()
        self.address, self.region_bytes = address, region_bytes
        self.device = OpenDevice(
            name=chosen.device, gid_index=chosen.gid_index, address=address, size=region_bytes, gpu=device
        )
        self._token = os.urandom(TOKEN_BYTES)
        try:
            self._listener = VerbsListener(self.device, host=chosen.listen, token=self._token, timeout=PACKET_TIMEOUT)
        except CopierError:
            self.device.close()
            raise
        self._host = chosen.host or self.device.host()
        self._links: list[VerbsLink] = []
        self._closed = False

    def offer(self, rank: KvRank) -> KvRank:
        """See Copier."""
        handle = VerbsHandle(self.address, self.device.remote_key, self._host, self._listener.port, self._token)
        return msgspec.structs.replace(rank, handles={**rank.handles, self.kind: msgspec.msgpack.encode(handle)})

    def connect(self, peer: KvRank) -> VerbsLink:
        """See Copier. The link may still be connecting; one that fails to says so at its first transfer."""
        if self._closed:
            raise CopierError("the RDMA copier is closed")
        handle = _handle_of(peer)
        link = VerbsLink(self, handle, peer_bytes=peer.region_bytes, forget=self._links.remove)
        self._links.append(link)
        try:
            link.wait(self._connect_wait_s)
        except CopierError:
            link.close()
            raise
        return link

    def close(self) -> None:
        """See Copier."""
        if self._closed:
            return
        self._closed = True
        for link in list(self._links):
            link.close()
        self._listener.close()
        self.device.close()


def _handle_of(peer: KvRank) -> VerbsHandle:
    raw = peer.handles.get(CopierKind.VERBS)
    if not raw:
        raise CopierError("the peer does not offer RDMA")
    try:
        handle = msgspec.msgpack.decode(raw, type=VerbsHandle)
    except msgspec.DecodeError as wrong:
        raise CopierError(f"the peer's RDMA handle cannot be read: {wrong}") from wrong
    if not 0 < handle.port < 65536:
        raise CopierError("the peer's RDMA handle names no port")
    return handle


class VerbsLink:
    """See Link. Several transfers may share it; their READs complete in the order in which they were posted."""

    def __init__(
        self, copier: VerbsCopier, handle: VerbsHandle, *, peer_bytes: int, forget: Callable[[VerbsLink], None]
    ) -> None:
        self.copier, self.handle, self.peer_bytes = copier, handle, peer_bytes
        self.broken = ""
        #: Held by each call of a transfer, so that a cancel from another thread comes before or after it.
        self.lock = threading.RLock()
        self._forget = forget
        self._transfers: set[VerbsTransfer] = set()
        self._pair = copier.device.pair(asks=True, depth=DEPTH)
        self._line: socket.socket | None = None
        self._failure = ""
        self._connecting = threading.Thread(target=self._connect, name="verbs-connect", daemon=True)
        self._connecting.start()

    def begin(self, plan: CopyPlan) -> VerbsTransfer:
        """See Link."""
        self.ready()
        check_bounds(plan, source_bytes=self.peer_bytes, target_bytes=self.copier.region_bytes)
        transfer = VerbsTransfer(self, plan, forget=self._transfers.discard)
        self._transfers.add(transfer)
        return transfer

    def close(self) -> None:
        """See Link. Waits for an introduction that is under way, CONNECT_S at most for each of its steps."""
        if self.broken == "closed":
            return
        for transfer in list(self._transfers):
            transfer.cancel()
        self.tear_down("closed")
        self.broken = "closed"
        self._forget(self)

    def wait(self, seconds: float) -> None:
        """For the introduction, so long at most. Raises CopierError: it failed."""
        self._connecting.join(seconds)
        self.ready()

    def ready(self) -> bool:
        """Whether it is connected; collects completions. Raises CopierError: it is broken, or the peer is gone."""
        if not self.broken and self._connecting.is_alive():
            return False
        if not self.broken and (self._failure or self._is_cut()):
            self.tear_down(self._failure or "the peer has gone")
        self.check()
        try:
            with guarded("an RDMA read failed"):
                self._pair.poll()
        except CopierError as failure:
            self.tear_down(str(failure))
            raise
        return True

    def check(self) -> None:
        """Raises CopierError: it is broken."""
        if self.broken:
            raise CopierError(f"the RDMA link is broken: {self.broken}")

    def post(self, pieces: CopyPlan, first: int) -> int:
        """READs pieces from ``first`` on (addresses, not offsets) as far as there is room; returns how many."""
        with guarded("an RDMA read cannot be posted"):
            return int(self._pair.post(pieces.source, pieces.target, pieces.lengths, first, self.handle.remote_key))

    @property
    def posted(self) -> int:
        """READs ever."""
        return int(self._pair.posted)

    @property
    def completed(self) -> int:
        """READs whose bytes are there."""
        return int(self._pair.completed)

    def tear_down(self, why: str) -> None:
        """Ends the connection: the card writes nothing to the own region after this. Idempotent."""
        self.broken = self.broken or why
        line = self._line
        if line is not None:
            _shut(line)
        if self._connecting is not threading.current_thread():
            self._connecting.join()
        self._pair.close()
        if self._line is not None:
            self._line.close()

    def _connect(self) -> None:
        """In a thread: introduces itself. A failure is told by ``ready``."""
        try:
            line = socket.create_connection((self.handle.host, self.handle.port), timeout=CONNECT_S)
            self._line = line
            peer = introduce(line, token=self.handle.token, address=address_of(self._pair))
            join(self._pair, peer, timeout=PACKET_TIMEOUT)
            line.setblocking(False)
        except (OSError, CopierError) as failure:
            self._failure = f"no RDMA connection to {self.handle.host}: {failure}"

    def _is_cut(self) -> bool:
        """Whether the source closed the connection that stays open as long as it lives."""
        assert self._line is not None
        try:
            return not self._line.recv(1)
        except BlockingIOError:
            return False
        except OSError:
            return True


class VerbsTransfer:
    """See Transfer. The cards copy; ``advance`` posts what there is room for and looks."""

    def __init__(self, link: VerbsLink, plan: CopyPlan, *, forget: Callable[[VerbsTransfer], None]) -> None:
        self._link, self._forget = link, forget
        short = cut(plan, min(PIECE_BYTES_MAX, link.copier.device.message_bytes_max))
        self._pieces = CopyPlan(
            source=short.source + link.handle.address,
            target=short.target + link.copier.address,
            lengths=short.lengths,
        )
        self._next = 0
        self._last = 0  # number of the last READ that is this transfer's
        self._over = self._done = False

    def advance(self, bytes_max: int) -> bool:
        """See Transfer."""
        if bytes_max < 1:
            raise ValueError(f"bytes_max is {bytes_max}; a transfer that may copy nothing never ends")
        with self._link.lock:
            if self._done:
                return True
            if self._over:
                raise CopierError("the transfer was cancelled, or has failed before")
            try:
                return self._advance()
            except CopierError as failure:
                self._link.tear_down(str(failure))
                self.cancel()
                raise

    def cancel(self) -> None:
        """See Transfer."""
        with self._link.lock:
            self._cancel()

    def _cancel(self) -> None:
        self._over = True
        self._forget(self)
        give_up = time.monotonic() + CANCEL_S
        while self._under_way():
            try:
                self._link.ready()
            except CopierError as failure:
                self._link.tear_down(str(failure))
            if time.monotonic() > give_up:
                self._link.tear_down("a read could not be stopped in time")

    def _advance(self) -> bool:
        if not self._link.ready():
            return False
        if self._next < self._pieces.descriptors and (posted := self._link.post(self._pieces, self._next)):
            self._next += posted
            self._last = self._link.posted
        if self._next < self._pieces.descriptors or self._under_way():
            return False
        self._done = self._over = True
        self._forget(self)
        return True

    def _under_way(self) -> bool:
        return not self._link.broken and self._last > self._link.completed


def _shut(line: socket.socket) -> None:
    """Wakes whoever waits for it."""
    try:
        line.shutdown(socket.SHUT_RDWR)
    except OSError:  # not connected yet, or not any more
        pass
