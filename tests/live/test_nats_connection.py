"""A connection that is closed while its server goes away."""

import asyncio

import pytest
from millrace.actor.config import BusConfig
from millrace.actor.connection import Connection
from millrace.actor.meter import RuntimeMeter
from prometheus_client import CollectorRegistry


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Speaks as much NATS as a connection needs."""
    writer.write(b'INFO {"server_id":"s","version":"2","max_payload":1048576,"headers":true}\r\n')
    while line := await reader.readline():
        if line.startswith(b"PING"):
            writer.write(b"PONG\r\n")


async def test_closing_while_the_server_goes_away_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    bus = BusConfig(cluster="c", servers=[f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"])
    meter = RuntimeMeter(CollectorRegistry())
    connection = Connection(bus=bus, name="n", meter=meter, log=lambda level, event, fields: None)
    await connection.connect()

    async def lost() -> None:
        raise ConnectionResetError("Connection lost")

    # What asyncio's stream does once the peer has gone, while the client still has something to write.
    monkeypatch.setattr(connection.client._transport, "drain", lost)
    connection.connected = False
    connection.client._pending.append(b"PING\r\n")
    connection.client._pending_data_size += 6
    await connection.close()
    await connection.close()
    server.close()
