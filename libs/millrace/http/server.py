"""Listens, keeps the connections, sweeps them for those that overstep a time, and ends them in order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Callable
from email.utils import formatdate

from millrace.http.client_connection import ConnectionLimits, HttpConnection
from millrace.http.exchange import DisconnectReason, Exchange, HttpRefusal

#: How often times are checked while there are connections, seconds: a limit is overstepped by at most this.
SWEEP_S = 0.5
#: Length of the kernel's accept queue.
BACKLOG = 2048


class HttpServer:
    """An HTTP/1.1 server in the running loop. Handlers are plain functions of an Exchange."""

    def __init__(
        self,
        handle: Callable[[Exchange], None],
        refused: Callable[[Exchange, HttpRefusal], None],
        *,
        limits: ConnectionLimits,
        connections_max: int,
        tls: ssl.SSLContext | None = None,
        look: Callable[[float], None] = lambda now_s: None,
    ) -> None:
        """Args:
        handle: Takes each whole request.
        refused: Answers what never became one (bad HTTP, too large, too slow).
        tls: Of each new connection; None for plain HTTP.
        look: Called every SWEEP_S while there are connections, with the loop's time.
        """
        self.handle = handle
        self.refused = refused
        self.limits = limits
        self.date_header = b""
        self.closing = False
        self._connections_max = connections_max
        self._tls = tls
        self._look = look
        self._connections: set[HttpConnection] = set()
        #: Bytes of bodies by connection, those that began first before the others.
        self._held: dict[HttpConnection, int] = {}
        self._held_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._taking: set[asyncio.Task[None]] = set()

    @property
    def connections(self) -> int:
        return len(self._connections)

    async def start(self, host: str, port: int, *, reuse_port: bool) -> int:
        """Listens; returns the port.

        Raises:
            OSError: the address cannot be bound.
        """
        self._server = await self._loop.create_server(
            self._connection, host, port, backlog=BACKLOG, reuse_port=reuse_port or None, ssl=self._tls
        )
        bound: socket.socket = self._server.sockets[0]
        return int(bound.getsockname()[1])

    def stop_listening(self) -> None:
        """Take no new connection; those that are open end after their next response.

        Connections that wait in the kernel's queue are taken first: closing the socket would reset them.
        """
        self.closing = True
        if self._server is None:
            return
        queues = [os.dup(listener.fileno()) for listener in self._server.sockets]
        self._server.close()
        for queue in queues:
            self._take_waiting(queue)

    def _take_waiting(self, queue: int) -> None:
        with socket.socket(fileno=queue) as listener, contextlib.suppress(BlockingIOError):
            while True:
                client, _ = listener.accept()
                task = self._loop.create_task(self._take(client))
                self._taking.add(task)
                task.add_done_callback(self._taking.discard)

    async def _take(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it has left
            await self._loop.connect_accepted_socket(self._connection, client, ssl=self._tls)

    def _connection(self) -> HttpConnection:
        return HttpConnection(self)

    def close_idle(self) -> None:
        """End the connections on which nothing is asked."""
        for connection in list(self._connections):
            connection.close_when_idle()

    async def stop(self, grace_s: float) -> None:
        """End everything; what is not done within the grace is cut."""
        self.stop_listening()
        self.close_idle()
        until_s = self._loop.time() + grace_s
        while any(c.busy for c in self._connections) and self._loop.time() < until_s:  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # polled, but only while the process ends
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in list(self._connections):
            if connection.busy:
                connection.cut(DisconnectReason.STOPPING)
            else:
                connection.transport.close()

    def now_s(self) -> float:
        return self._loop.time()

    def opened(self, connection: HttpConnection) -> bool:
        """Keep a connection; False beyond the bound."""
        if len(self._connections) >= self._connections_max:
            return False
        self._connections.add(connection)
        if self._sweeper is None:
            self._sweep()
        return True

    def lost(self, connection: HttpConnection) -> None:
        self._connections.discard(connection)
        self.hold(connection, 0)

    def hold(self, connection: HttpConnection, count: int) -> None:
        """Note the bytes of bodies that a connection holds. Beyond the bound of all together those that began first
        give way, so that nobody who holds half bodies locks others out.
        """
        self._held_bytes += count - self._held.get(connection, 0)
        self._held[connection] = count
        if not count:
            del self._held[connection]
        while self._held_bytes > self.limits.bodies_bytes_max:
            first = next(iter(self._held))
            self._held_bytes -= self._held.pop(first)
            first.give_way()

    def _sweep(self) -> None:
        self.date_header = b"date: " + formatdate(usegmt=True).encode() + b"\r\n"
        now_s = self._loop.time()
        for connection in list(self._connections):
            connection.sweep(now_s)
        self._look(now_s)
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep) if self._connections else None
