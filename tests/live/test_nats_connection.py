"""A connection that is closed while its server goes away."""

import asyncio

import pytest
from millrace.actor.config import BusConfig
from millrace.actor.connection import Connection
from millrace.actor.meter import RuntimeMeter
from prometheus_client import CollectorRegistry


class Server:
    """Speaks as much NATS as a connection needs."""

    async def connection(self) -> Connection:
        """A connection to it."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        bus = BusConfig(cluster="c", servers=[f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"])
        meter = RuntimeMeter(CollectorRegistry())
        connection = Connection(bus=bus, name="n", meter=meter, log=lambda level, event, fields: None)
        await connection.connect()
        return connection

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        writer.write(b'INFO {"server_id":"s","version":"2","max_payload":1048576,"headers":true}\r\n')
        while line := await reader.readline():
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
        writer.close()

    def go_away(self) -> None:
        """Closes the connection and takes no other one."""
        self._server.close()
        self._writer.close()


class SlowSocket:
    """The end of a connection's socket, which takes its time; as in asyncio's streams all await one future."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, connection: Connection) -> None:
        self._closed = asyncio.get_running_loop().create_future()
        self.awaited = asyncio.Event()
        monkeypatch.setattr(connection.client._transport, "wait_closed", self._wait_closed)

    async def _wait_closed(self) -> None:
        self.awaited.set()
        await self._closed


async def test_closing_while_the_client_reconnects_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client cancels its attempt to reconnect, and so the future that its own end awaits next."""
    server = Server()
    connection = await server.connection()
    socket = SlowSocket(monkeypatch, connection)
    server.go_away()
    await socket.awaited.wait()
    await connection.close()


async def test_a_close_that_is_cancelled_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    connection = await server.connection()
    socket = SlowSocket(monkeypatch, connection)
    closing = asyncio.create_task(connection.close())
    await socket.awaited.wait()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    server.go_away()


async def test_closing_while_the_server_goes_away_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    connection = await server.connection()

    async def lost() -> None:
        raise ConnectionResetError("Connection lost")

    # What asyncio's stream does once the peer has gone, while the client still has something to write.
    monkeypatch.setattr(connection.client._transport, "drain", lost)
    connection.connected = False
    connection.client._pending.append(b"PING\r\n")
    connection.client._pending_data_size += 6
    await connection.close()
    await connection.close()
    server.go_away()
