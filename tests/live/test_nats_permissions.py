"""Per-role permissions, as a real nats-server enforces them: what the catalog allows goes through, nothing else."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import nats
import pytest
from millrace.actor.bucket_reading import BucketUnreadable, read_bucket
from millrace.actor.buckets import allow_direct_reads, ensure_bucket
from millrace.actor.nats_client import settle
from millrace.contracts.catalog import BUCKETS, CHANNELS, Channel, Role
from millrace.contracts.subjects import Subjects
from millrace.supervision.nats_config import NatsServerOptions, nats_config
from nats.aio.client import Client
from nats.errors import NoRespondersError

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
    """Return what the server has refused so far."""
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


# the key-value store


@pytest.fixture
async def buckets(server: str) -> None:
    async with client_of(server, Role.SUPERVISOR, []) as client:
        for bucket in BUCKETS:
            await ensure_bucket(client.jetstream(), name=bucket.name, full_name=SUBJECTS.bucket(bucket.name))
        await client.publish(f"$KV.{SUBJECTS.bucket('plan')}.m", b"a plan")
        await client.publish(f"$KV.{SUBJECTS.bucket('plan')}.n", b"old")
        await client.publish(f"$KV.{SUBJECTS.bucket('plan')}.n", b"new")
        await client.publish(f"$KV.{SUBJECTS.bucket('plan')}.o", b"", headers={"KV-Operation": "DEL"})
        await settle(client)


def consumer(stream: str, *, deliver: str = "_INBOX.x.y", **config: object) -> bytes:
    fields = {"deliver_subject": deliver, "deliver_policy": "last_per_subject", "ack_policy": "none", **config}
    return json.dumps({"stream_name": stream, "config": fields}).encode()


@pytest.mark.parametrize("role", [role for role in Role if role is not Role.SUPERVISOR])
async def test_a_role_watches_its_buckets_and_creates_no_other_consumer(server: str, buckets: None, role: Role):
    for bucket in BUCKETS:
        stream = f"KV_{SUBJECTS.bucket(bucket.name)}"
        errors: list[str] = []
        async with client_of(server, role, errors) as client:
            await client.publish(f"$JS.API.CONSUMER.CREATE.{stream}", consumer(stream))
            assert bool(await refusals(client, errors)) == (role not in bucket.watchers), f"{role} on {bucket.name}"


@pytest.mark.parametrize("role", [role for role in Role if role is not Role.SUPERVISOR])
async def test_no_role_names_changes_inspects_or_deletes_a_consumer(server: str, buckets: None, role: Role):
    stream = f"KV_{SUBJECTS.bucket('plan')}"
    for subject in (
        f"$JS.API.CONSUMER.CREATE.{stream}.w",
        f"$JS.API.CONSUMER.CREATE.{stream}.w.$KV.{SUBJECTS.bucket('plan')}.m",
        f"$JS.API.CONSUMER.DURABLE.CREATE.{stream}.w",
        f"$JS.API.CONSUMER.DELETE.{stream}.w",
        f"$JS.API.CONSUMER.INFO.{stream}.w",
        f"$JS.API.CONSUMER.NAMES.{stream}",
        f"$JS.API.CONSUMER.MSG.NEXT.{stream}.w",
        f"$JS.API.STREAM.PURGE.{stream}",
        f"$JS.API.STREAM.DELETE.{stream}",
    ):
        errors: list[str] = []
        async with client_of(server, role, errors) as client:
            await client.publish(subject, consumer(stream, name="w"))
            assert await refusals(client, errors), f"{role} on {subject}"


async def test_a_watcher_cannot_take_over_the_consumer_of_another_one(server: str, buckets: None):
    stream = f"KV_{SUBJECTS.bucket('plan')}"
    async with client_of(server, Role.SUPERVISOR, []) as client:
        await client.jetstream().add_consumer(
            stream, name="w", deliver_subject="_INBOX.coordinator.w", ack_policy="none"
        )
        async with client_of(server, Role.INGRESS, []) as other:
            body = consumer(stream, deliver=SUBJECTS.engine("a", "submit"), name="w")
            await other.request(f"$JS.API.CONSUMER.CREATE.{stream}", body, timeout=2)
        info = await client.jetstream().consumer_info(stream, "w")
        assert info.config.deliver_subject == "_INBOX.coordinator.w"


@pytest.mark.parametrize("role", [Role.OBSERVER, Role.OPERATOR, Role.TAGGER])
async def test_whoever_looks_on_reads_a_bucket_without_a_consumer(server: str, buckets: None, role: Role):
    errors: list[str] = []
    async with client_of(server, role, errors) as client:
        assert await read_bucket(client, SUBJECTS.bucket("plan")) == [b"a plan", b"new"]
        assert await read_bucket(client, SUBJECTS.bucket("lease")) == []
        assert not await refusals(client, errors)


async def test_a_bucket_that_is_not_there_is_unreadable(server: str, buckets: None):
    async with client_of(server, Role.SUPERVISOR, []) as client:
        with pytest.raises(BucketUnreadable):
            await read_bucket(client, "mr_local_nothing")


async def test_a_bucket_of_an_earlier_version_is_made_readable(server: str, buckets: None):
    name = SUBJECTS.bucket("plan")
    async with client_of(server, Role.SUPERVISOR, []) as client:
        stream = client.jetstream()
        info = await stream.stream_info(f"KV_{name}")
        await stream.update_stream(info.config, allow_direct=False)
        with pytest.raises((BucketUnreadable, NoRespondersError)):
            await read_bucket(client, name)
        await allow_direct_reads(stream, full_name=name)
        assert await read_bucket(client, name) == [b"a plan", b"new"]
