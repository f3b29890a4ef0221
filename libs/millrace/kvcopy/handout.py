"""Hands a region's memfd to peers over a Unix socket, which works between containers that share a volume.

One greeting goes to whoever connects: the region's incarnation and size, with the memfd opened read-only. Then the
connection stays open and silent; its end tells a reader that the owner is gone. Who may connect is decided by the
socket's permissions (its owner only).
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import time
from pathlib import Path
from threading import Thread

from millrace.kvcopy.copier_port import CopierError
from millrace.kvcopy.memory import Bytes, SharedRegion, map_sealed

#: Magic with a version, incarnation, size.
_GREETING = struct.Struct("<8s16sQ")
_MAGIC = b"MRKVFD01"
INCARNATION_BYTES = 16

#: One descriptor each; a machine has some tens of engines at most, and reconnecting peers leave the old ones at once.
PEERS_MAX = 256
#: The owner answers from a thread of its own; seconds mean that its process is stopped.
CONNECT_SECONDS = 2.0
#: After a connection that could not be accepted.
_PAUSE_SECONDS = 0.1
#: The kernel's limit on the path of a Unix socket, with the final zero.
_PATH_BYTES_MAX = 107


class RegionServer:
    """Answers peers from a thread of its own, so that neither a step nor an event loop delays or deadlocks them."""

    def __init__(self, region: SharedRegion, path: Path) -> None:
        """Listens at once. Raises CopierError: the path cannot be used."""
        self.incarnation = os.urandom(INCARNATION_BYTES)
        self.path = path
        self._greeting = _GREETING.pack(_MAGIC, self.incarnation, region.size)
        # Its own open file, without the right to write: what a peer receives it cannot map writable.
        self._fd = os.open(f"/proc/self/fd/{region.fd}", os.O_RDONLY | os.O_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._peers: set[socket.socket] = set()
        self._wake, woken = socket.socketpair()
        try:
            self._listener = _listen(path)
        except BaseException:
            os.close(self._fd)
            self._selector.close()
            self._wake.close()
            woken.close()
            raise
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(woken, selectors.EVENT_READ)
        self._woken = woken
        self._thread = Thread(target=self._serve, name="millrace-kv-handout", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and all connections; peers notice at their next read. Idempotent."""
        if self._fd < 0:
            return
        self._wake.close()
        self._thread.join()
        self.path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._woken:
                    self._end()
                    return
                if key.fileobj is self._listener:
                    self._greet()
                else:
                    self._drop(key.fileobj)  # a peer never says anything: it has gone

    def _greet(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError:  # it went away meanwhile, or there are no descriptors left, and it would be here again at once
            time.sleep(_PAUSE_SECONDS)
            return
        peer.setblocking(False)
        try:
            if len(self._peers) < PEERS_MAX:
                socket.send_fds(peer, [self._greeting], [self._fd])
                self._peers.add(peer)
                self._selector.register(peer, selectors.EVENT_READ)
                return
        except OSError:
            self._peers.discard(peer)
        peer.close()

    def _drop(self, peer: object) -> None:
        assert isinstance(peer, socket.socket)
        self._selector.unregister(peer)
        self._peers.discard(peer)
        peer.close()

    def _end(self) -> None:
        for held in (self._listener, self._woken, *self._peers):
            held.close()
        self._peers.clear()
        self._selector.close()


class RemoteRegion:
    """A peer's region, mapped read-only, and the connection that tells whether the peer is still there."""

    def __init__(self, path: str, *, incarnation: bytes, size: int) -> None:
        """Asks the server at ``path``. Raises CopierError: no server there, another one, or another size."""
        self._connection = _connect(path)
        try:
            self.memory: Bytes = self._receive(incarnation, size)
        except BaseException:
            self._connection.close()
            raise
        self._connection.setblocking(False)

    def check(self) -> None:
        """Raises CopierError: the owner is gone, or this was closed."""
        try:
            said = self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError as failure:
            raise CopierError(f"the peer's region is closed: {failure}") from failure
        raise CopierError("the peer has gone" if not said else "the peer says what it never should")

    def close(self) -> None:
        """Ends the connection; the memory is unmapped when the last transfer lets go of it. Idempotent."""
        self._connection.close()
        self.memory = self.memory[:0].copy()

    def _receive(self, incarnation: bytes, size: int) -> Bytes:
        try:
            said, descriptors, _, _ = socket.recv_fds(self._connection, _GREETING.size, 1)
        except OSError as failure:
            raise CopierError(f"the peer does not hand out its region: {failure}") from failure
        try:
            if len(said) != _GREETING.size or len(descriptors) != 1:
                raise CopierError("the peer has no room for another reader, or is none of ours")
            magic, theirs, actual = _GREETING.unpack(said)
            if magic != _MAGIC or theirs != incarnation:
                raise CopierError("another process, or a later one, answers at the peer's socket")
            if actual < size:
                raise CopierError(f"the peer's region has {actual} bytes, not the {size} that it announced")
            return map_sealed(descriptors[0], size)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def _connect(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    connection.settimeout(CONNECT_SECONDS)
    try:
        connection.connect(path)
    except OSError as failure:
        connection.close()
        raise CopierError(f"no server hands out a region at {path}: {failure}") from failure
    return connection


def _listen(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > _PATH_BYTES_MAX:
        raise CopierError(f"a Unix socket's path has at most {_PATH_BYTES_MAX} bytes: {path}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        _remove_stale(path)
        os.fchmod(listener.fileno(), 0o600)  # before it can be reached
        listener.bind(str(path))
        listener.listen(PEERS_MAX)
        listener.setblocking(False)
    except OSError as failure:
        listener.close()
        raise CopierError(f"cannot listen at {path}: {failure}") from failure
    return listener


def _remove_stale(path: Path) -> None:
    """Removes what a killed predecessor left. Raises OSError: a server answers there, or it is no socket."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(CONNECT_SECONDS)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
    raise FileExistsError("another process listens there")
