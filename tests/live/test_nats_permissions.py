"""Per-role permissions, as a real nats-server enforces them: what the catalog allows goes through, nothing else."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import nats
import pytest
from millrace.actor.nats_client import settle
from millrace.contracts.catalog import CHANNELS, Channel, Role
from millrace.contracts.subjects import Subjects
from millrace.supervision.nats_config import NatsServerOptions, nats_config
from nats.aio.client import Client

PASSWORDS = {role: f"secret-of-{role}" for role in Role}
SUBJECTS = Subjects("local")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("nats")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = NatsServerOptions(port=port, store_dir=str(folder / "js"))
    (folder / "nats.conf").write_text(nats_config(options, PASSWORDS))
    binary = Path(sys.executable).parent / "nats-server"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([binary, "-c", folder / "nats.conf"], stdout=log, stderr=log)
    try:
        _wait_until_open(port)
        yield f"nats://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=10)


def _wait_until_open(port: int) -> None:
    for _ in range(200):
        with socket.socket() as probe:
            probe.settimeout(0.05)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError("nats-server did not open its port")


@asynccontextmanager
async def client_of(server: str, role: Role, errors: list[str]) -> AsyncIterator[Client]:
    async def note(error: Exception) -> None:
        errors.append(str(error))

    prefix = f"_INBOX.{role}".encode()
    client = await nats.connect(
        server, user=str(role), password=PASSWORDS[role], error_cb=note, inbox_prefix=prefix, max_reconnect_attempts=0
    )
    try:
        yield client
    finally:
        await client.close()


def example(channel: Channel) -> str:
    tokens = ["x" if token.startswith("{") else token for token in channel.subject.split(".")]
    return ".".join([SUBJECTS.prefix, *tokens])


async def refusals(client: Client, errors: list[str]) -> list[str]:
    """What the server has refused so far."""
    await settle(client)
    return [error for error in errors if "permissions violation" in error.lower()]


@pytest.mark.parametrize("role", list(Role))
async def test_a_role_may_publish_what_the_catalog_says_and_nothing_else(server: str, role: Role) -> None:
    for channel in CHANNELS:
        errors: list[str] = []
        async with client_of(server, role, errors) as client:
            await client.publish(example(channel), b"x")
            refused = bool(await refusals(client, errors))
        assert refused == (role not in channel.senders), f"{role} publishing on {channel.name}"


@pytest.mark.parametrize("role", list(Role))
async def test_a_role_may_subscribe_to_what_the_catalog_says_and_nothing_else(server: str, role: Role) -> None:
    reads_all = role in (Role.OBSERVER, Role.OPERATOR, Role.SUPERVISOR)
    for channel in CHANNELS:
        errors: list[str] = []
        async with client_of(server, role, errors) as client:
            await client.subscribe(example(channel))
            refused = bool(await refusals(client, errors))
        assert refused == (role not in channel.receivers and not reads_all), f"{role} subscribing to {channel.name}"


@pytest.mark.parametrize("subject", ["mr.other.tokens.x", ">", "_INBOX.ingress.x", "$SYS.REQ.SERVER.PING"])
async def test_nobody_reads_beyond_their_own(server: str, subject: str) -> None:
    errors: list[str] = []
    async with client_of(server, Role.TAGGER, errors) as client:
        await client.subscribe(subject)
        assert await refusals(client, errors)


async def test_a_wrong_password_is_refused(server: str) -> None:
    with pytest.raises(nats.errors.Error):
        await nats.connect(server, user="ingress", password="wrong", allow_reconnect=False, max_reconnect_attempts=0)


async def test_only_the_coordinator_writes_plans(server: str) -> None:
    bucket = SUBJECTS.bucket("plan")
    for role, may in ((Role.COORDINATOR, True), (Role.WORKER, False), (Role.INGRESS, False)):
        errors: list[str] = []
        async with client_of(server, role, errors) as client:
            await client.publish(f"$KV.{bucket}.m", b"x")
            assert bool(await refusals(client, errors)) == (not may), role


async def test_a_worker_may_take_its_whole_inbox_with_one_subscription(server: str) -> None:
    for role, may in ((Role.WORKER, True), (Role.INGRESS, False), (Role.COORDINATOR, False)):
        errors: list[str] = []
        async with client_of(server, role, errors) as client:
            await client.subscribe(SUBJECTS.engine("a", "*"))
            assert bool(await refusals(client, errors)) == (not may), role
