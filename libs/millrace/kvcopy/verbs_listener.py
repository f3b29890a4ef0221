"""Listener for introductions of readers. A reliable RDMA connection needs the queue pair numbers of both sides, and the
KvRank carries only what the source knows.

A reader connects by TCP and sends a Greeting. The source makes a queue pair that only answers READs, connects it to the
reader's and sends its address. The TCP connection then stays open and silent. When either process ends, the connection
closes. That ends the queue pair at the source and tells the reader at once; RDMA by itself would retry for half a
second.

    greeting --Greeting with the token--> serving --closed, or any byte--> gone
        any other bytes, too many peers, or 2 s: gone

Frames: 4 bytes of length (little endian), then MessagePack.
"""

from __future__ import annotations

import hmac
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from millrace.kvcopy.copier import CopierError
from millrace.kvcopy.verbs_device import OpenDevice, PairAddress, address_of, join

if TYPE_CHECKING:
    from millrace_native.verbs import QueuePair

#: Readers at once, greeting ones included. An instance has few peers; a queue pair holds some 100 KB.
PEERS_MAX = 64
GREETING_S = 2.0
#: A Greeting has about 70 bytes.
FRAME_BYTES_MAX = 1024
_LENGTH = struct.Struct("<I")


class Greeting(msgspec.Struct, frozen=True, array_like=True):
    """A reader's introduction. The token came with the source's KvRank: who has none is no reader."""

    token: bytes
    address: PairAddress


class _Peer:
    """One connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.received = b""
        self.until = time.monotonic() + GREETING_S
        self.pair: QueuePair | None = None


class VerbsListener:
    """A thread that greets readers and keeps a queue pair for each until it leaves. Closed by its owner."""

    def __init__(self, device: OpenDevice, *, host: str, token: bytes, timeout: int) -> None:
        """Listens on any free port of ``host`` (empty: of all addresses). Raises CopierError: it cannot."""
        self._device, self._token, self._timeout = device, token, timeout
        try:
            self._socket = socket.create_server((host, 0), backlog=8)
        except OSError as failure:
            raise CopierError(f"no listener for RDMA peers on {host or 'any address'}: {failure}") from failure
        self.port: int = self._socket.getsockname()[1]
        self._socket.setblocking(False)
        self._waker, self._wake = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._selector.register(self._waker, selectors.EVENT_READ)
        self._peers: dict[socket.socket, _Peer] = {}
        self._thread = threading.Thread(target=self._run, name="verbs-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, every connection and queue pair. Idempotent."""
        if self._thread.is_alive():
            self._wake.send(b"x")
            self._thread.join()
        for peer in list(self._peers.values()):
            self._drop(peer)
        self._selector.close()
        for each in (self._socket, self._waker, self._wake):
            each.close()

    def _run(self) -> None:
        while True:
            greeting = any(peer.pair is None for peer in self._peers.values())
            for key, _ in self._selector.select(GREETING_S if greeting else None):
                if key.fileobj is self._waker:
                    return
                if key.fileobj is self._socket:
                    self._accept()
                else:
                    self._hear(self._peers[key.fileobj])  # type: ignore[index]  # registered with sockets only
            self._drop_where(lambda peer: peer.pair is None and time.monotonic() > peer.until)

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError:  # it left again, or there are no descriptors: it will see a closed connection or try again
            return
        connection.setblocking(False)
        peer = self._peers[connection] = _Peer(connection)
        self._selector.register(connection, selectors.EVENT_READ)
        if len(self._peers) > PEERS_MAX:
            self._drop(peer)

    def _hear(self, peer: _Peer) -> None:
        try:
            data = peer.connection.recv(FRAME_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or peer.pair is not None:
            self._drop(peer)
            return
        peer.received += data
        try:
            frame = split_frame(peer.received)
            if frame is not None:
                self._welcome(peer, frame)
        except (CopierError, OSError):
            self._drop(peer)

    def _welcome(self, peer: _Peer, frame: bytes) -> None:
        try:
            greeting = msgspec.msgpack.decode(frame, type=Greeting)
        except msgspec.DecodeError as wrong:
            raise CopierError("not a greeting") from wrong
        if not hmac.compare_digest(greeting.token, self._token):
            raise CopierError("a wrong token")
        peer.pair = self._device.pair(asks=False, depth=1)
        join(peer.pair, greeting.address, timeout=self._timeout)
        peer.connection.send(frame_of(address_of(peer.pair)))

    def _drop_where(self, condition: Callable[[_Peer], bool]) -> None:
        for peer in [peer for peer in self._peers.values() if condition(peer)]:
            self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        del self._peers[peer.connection]
        self._selector.unregister(peer.connection)
        if peer.pair is not None:
            peer.pair.close()
        peer.connection.close()


def introduce(connection: socket.socket, *, token: bytes, address: PairAddress) -> PairAddress:
    """The reader's part, on a connected socket with a timeout. Raises CopierError or OSError: no good answer."""
    connection.sendall(frame_of(Greeting(token, address)))
    received = b""
    while (frame := split_frame(received)) is None:
        data = connection.recv(FRAME_BYTES_MAX)
        if not data:
            raise CopierError("the source refused: it was restarted, or has too many readers")
        received += data
    try:
        return msgspec.msgpack.decode(frame, type=PairAddress)
    except msgspec.DecodeError as wrong:
        raise CopierError(f"the source's answer cannot be read: {wrong}") from wrong


def frame_of(message: msgspec.Struct) -> bytes:
    """A message with its length before it."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


def split_frame(received: bytes) -> bytes | None:
    """The body of the one frame that was received; None while it is not complete. Raises CopierError: too long."""
    if len(received) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(received)
    if length > FRAME_BYTES_MAX or len(received) > _LENGTH.size + length:
        raise CopierError("a frame that is too long, or bytes after it")
    return received[_LENGTH.size :] if len(received) == _LENGTH.size + length else None
