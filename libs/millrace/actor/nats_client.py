"""nats-py's client with a synchronous hot path: a message goes from the socket's buffer to its taker by plain calls.

nats-py parses every header into a dictionary, queues each message and wakes a task per subscription; two
subscriptions may then be served out of order. Here subscriptions of the runtime bypass the queue
(``nats_parser.py``), so messages of one connection are handled in the order in which the server sent them. Publishing
appends to the client's buffer without awaiting; the end of the loop's turn writes it, and nats-py's flusher does where
the socket is behind, since it waits for it.

Everything of nats-py that is not its public interface and that this module relies on (nats-py 2.16; the bus contract
suite fails where one of them changes): ``_ps`` (its parser, called with what was read), ``Client._process_msg``,
``_subs``, ``_sid`` (replayed after a reconnect), ``_pending``, ``_pending_data_size``, ``_flush_queue``, ``_transport``
(the write buffer, its flusher and the socket), ``_process_connect_init`` (makes the socket's reader),
``_reconnection_task``, ``_server_pool`` and ``_resp_sub_prefix`` (cleared before a closed client is opened again), and
``nats.protocol.command``.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport
from nats.errors import Error as NatsError
from nats.protocol import command

from millrace.actor.nats_parser import DirectParser, Taker

#: Bound of bytes that wait for the socket. A healthy server takes them within a millisecond; 8 MiB are about a second
#: of full token traffic of a large node, after which dropping beats serving stale messages.
PENDING_BYTES_MAX = 8 * 1024 * 1024

#: A task that has not ended by then is cancelled again, seconds.
AGAIN_S = 0.1
#: Longest wait for the end of a socket.
CLOSED_S = 2.0


async def settle(client: Client, timeout_s: float = 3.0) -> None:
    """Waits until the server has processed everything that was sent before, subscriptions included.

    nats-py's ``flush`` writes its PING *ahead* of what still waits in the buffer, so one flush proves nothing: its PONG
    may come before the server's refusal of a subscription. By that PONG the buffer was written, so a second one does.

    Raises:
        nats.errors.Error: the server did not answer in time, or the connection is closed.
    """
    await client.flush(timeout=timeout_s)  # type: ignore[arg-type]
    await client.flush(timeout=timeout_s)  # type: ignore[arg-type]


class DirectClient(Client):
    """A NATS connection whose runtime subscriptions are served in order, synchronously."""

    def __init__(self) -> None:
        super().__init__()
        self._takers: dict[int, Taker] = {}
        self._wanted: dict[int, tuple[str, str]] = {}
        self._ps: DirectParser = DirectParser(self, self._takers)
        self._writing = False  # the end of this turn writes

    async def _process_connect_init(self) -> None:
        await super()._process_connect_init()
        if isinstance(self._transport, TcpTransport) and self._transport._io_reader is not None:
            self._ps.read_from(self._transport._io_reader)

    async def reopen(self, **options: Any) -> None:
        """Connects again after the client gave a connection up, with all subscriptions; tries for ever.

        nats-py closes for good on protocol errors that the server states (a payload over its limit, say), and forgets
        its subscriptions then.
        """
        self._server_pool.clear()
        self._resp_sub_prefix = None  # nats-py's own inbox is made anew with its next request
        self._pending, self._pending_data_size = [], 0
        self._ps.reset()
        await self.connect(**options)
        for number, (subject, queue_group) in self._wanted.items():
            self._subs[number] = Subscription(self, number, subject, queue=queue_group)
            self._push(command.sub_cmd(subject, queue_group, number))

    def subscribe_now(self, subject: str, queue_group: str, taker: Taker) -> int:
        """Subscribes, now or with the next reconnect; returns the subscription's number."""
        self._sid += 1
        number = self._sid
        self._subs[number] = Subscription(self, number, subject, queue=queue_group)
        self._takers[number] = taker
        self._wanted[number] = (subject, queue_group)
        if self.is_connected:
            self._push(command.sub_cmd(subject, queue_group, number))
        return number

    def unsubscribe_now(self, number: int) -> None:
        """Ends a subscription; messages under way are dropped."""
        self._takers.pop(number, None)
        self._wanted.pop(number, None)
        if self._subs.pop(number, None) is not None and self.is_connected:
            self._push(command.unsub_cmd(number, 0))

    def publish_now(self, subject: str, reply: str, headers: bytes, payload: bytes) -> bool:
        """Queues one message for the socket; False where the bound of waiting bytes is reached."""
        head = len(headers)
        line = f"HPUB {subject} {reply} {head} {head + len(payload)}\r\n"
        whole = b"".join((line.encode(), headers, payload, b"\r\n"))
        if self._pending_data_size + len(whole) > PENDING_BYTES_MAX:
            return False
        self._push(whole)
        return True

    def _push(self, whole: bytes) -> None:
        self._pending.append(whole)
        self._pending_data_size += len(whole)
        if not self._writing:
            self._writing = True
            asyncio.get_running_loop().call_soon(self._write)

    def _write(self) -> None:
        """Write what this turn published; left to nats-py's flusher where the socket has not taken the last bytes."""
        self._writing = False
        if not self._pending or not self.is_connected:
            return
        writer = self._transport._io_writer if isinstance(self._transport, TcpTransport) else None
        flushes = self._flush_queue
        if writer is not None and not writer.is_closing() and not writer.transport.get_write_buffer_size():
            pending, self._pending, self._pending_data_size = self._pending, [], 0
            writer.write(b"".join(pending))
        elif flushes is not None and flushes.empty():
            flushes.put_nowait(asyncio.get_running_loop().create_future())


async def end_task(task: asyncio.Task[Any]) -> None:
    """Cancels a task until it has ended.

    Once is not enough where it awaits nats-py: a cancellation that comes with an answer is lost in Python 3.11's
    ``asyncio.wait_for``, and a loop goes on.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=AGAIN_S)


async def close_client(client: Client) -> None:
    """Disconnect, also where the server goes away meanwhile."""
    while (reconnecting := client._reconnection_task) is not None and not reconnecting.done():
        await end_task(reconnecting)  # nats-py cancels it once; it then goes on, and the process never ends
    if not client.is_connected:
        client._pending, client._pending_data_size = [], 0  # nats-py would write it to a socket that is closed
    closing = asyncio.ensure_future(client.close())
    await asyncio.wait([closing], timeout=CLOSED_S)
    if not closing.done():
        await end_task(closing)  # asyncio never says that a socket has closed that was given up amid TLS
        return
    # It went away while the client wrote what was left, or the client, which cancels its attempt to reconnect,
    # cancelled the end of the socket, too, which it awaits next.
    with contextlib.suppress(NatsError, OSError, RuntimeError, asyncio.CancelledError):
        closing.result()
