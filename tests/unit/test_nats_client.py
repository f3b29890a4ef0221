"""The client's way out: one write per turn of the loop, and the flusher where the socket is behind; its end."""

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest
from millrace.actor import nats_client
from millrace.actor.nats_client import PENDING_BYTES_MAX, DirectClient, close_client
from nats.aio.transport import TcpTransport


class Socket:
    """A socket's transport and writer at once."""

    def __init__(self, behind: int = 0) -> None:
        self.written: list[bytes] = []
        self.behind = behind
        self.closing = False
        self.transport = self

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return self.behind


def client_on(socket: Socket, monkeypatch: pytest.MonkeyPatch, *, connected: bool = True) -> Any:
    client: Any = DirectClient()
    transport: Any = TcpTransport()
    transport._io_writer = socket
    client._transport, client._flush_queue = transport, asyncio.Queue()
    monkeypatch.setattr(DirectClient, "is_connected", property(lambda _: connected))
    return client


async def test_writes_what_a_turn_published_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    socket = Socket()
    client = client_on(socket, monkeypatch)
    assert client.publish_now("a", "", b"H", b"one")
    assert client.publish_now("b", "r", b"H", b"two")
    assert socket.written == []
    await asyncio.sleep(0)
    assert socket.written == [b"HPUB a  1 4\r\nHone\r\nHPUB b r 1 4\r\nHtwo\r\n"]
    assert client.pending_data_size == 0
    client.publish_now("c", "", b"", b"")
    await asyncio.sleep(0)
    assert len(socket.written) == 2


async def test_leaves_it_to_the_flusher_where_the_socket_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    socket = Socket(behind=1)
    client = client_on(socket, monkeypatch)
    for _ in range(3):
        client.publish_now("a", "", b"", b"x")
        await asyncio.sleep(0)
    assert socket.written == []
    assert client._flush_queue.qsize() == 1  # woken once
    assert len(client._pending) == 3


async def test_what_waits_for_a_slow_server_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_on(Socket(behind=1), monkeypatch)
    large = b"x" * 1_000_000
    taken = 0
    while client.publish_now("a", "", b"", large):
        taken += 1
        await asyncio.sleep(0)
    assert taken == PENDING_BYTES_MAX // 1_000_000
    assert client.pending_data_size <= PENDING_BYTES_MAX


@pytest.mark.parametrize(("connected", "closing"), [(False, False), (True, True)])
async def test_keeps_what_cannot_be_written(connected: bool, closing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    socket = Socket()
    socket.closing = closing
    client = client_on(socket, monkeypatch, connected=connected)
    client.publish_now("a", "", b"", b"x")
    await asyncio.sleep(0)
    assert socket.written == []
    assert len(client._pending) == 1


async def test_a_socket_that_never_says_that_it_has_closed_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_client, "CLOSED_S", 0.01)
    client: Any = DirectClient()
    client._flush_queue, client._transport = asyncio.Queue(), Mock()
    client._transport.wait_closed.return_value = asyncio.get_running_loop().create_future()
    await asyncio.wait_for(close_client(client), 5)
    client._transport.close.assert_called_once()


async def test_a_closed_client_does_not_go_on_to_reconnect() -> None:
    async def attempts() -> None:
        for lost in (True, False):  # Python 3.11's wait_for loses a cancellation that comes with the server's refusal
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                if not lost:
                    raise

    client: Any = DirectClient()
    client._flush_queue, client.options = asyncio.Queue(), {"reconnect_time_wait": 0}
    client._reconnection_task = asyncio.create_task(attempts())
    await asyncio.sleep(0)
    await close_client(client)
    assert client._reconnection_task.done()
