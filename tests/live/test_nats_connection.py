"""A connection that is closed while its server goes away."""

import asyncio
from pathlib import Path

import pytest
from millrace.actor.config import BusConfig
from millrace.actor.connection import Connection
from millrace.actor.effects import WatchKeys
from millrace.actor.loop import run_to_end
from millrace.actor.meter import RuntimeMeter
from millrace.actor.runtime_nats import NatsRuntime
from millrace.contracts.channels import Role
from millrace.supervision.nats_config import NatsServerOptions, nats_config
from prometheus_client import CollectorRegistry

from tests.contract.bus.harness import Logged
from tests.contract.bus.probe import Probe
from tests.testbed.nats_process import NatsProcess


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


def test_a_process_whose_server_and_supervisor_die_together_ends(tmp_path: Path) -> None:
    """It closes both of its connections; what waits for a socket that is gone must not keep it."""
    config = NatsServerOptions(store_dir=str(tmp_path / "s"))
    server = NatsProcess(tmp_path, nats_config(config, dict.fromkeys(Role, "x")))
    server.start()
    left = run_to_end(_closed_at_once(server))
    assert not left


async def _closed_at_once(server: NatsProcess) -> list[asyncio.Task[object]]:
    """Tasks that are still there after a runtime was closed just when its server went away."""
    bus = BusConfig(servers=[server.url], user="ingress", password="x")
    runtime = NatsRuntime(bus=bus, name="i", telemetry=Logged(), registry=CollectorRegistry())
    await runtime.connect()
    runtime.add(Probe("p", WatchKeys(bucket="plan")), accepts=())
    running = asyncio.create_task(runtime.run(signals=False))
    await asyncio.sleep(0.3)
    server.kill()
    await asyncio.sleep(0)
    await runtime.close()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
