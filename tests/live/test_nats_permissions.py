"""Per-role permissions, as a real nats-server enforces them: what the catalog allows goes through, nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import nats
import pytest
from millrace.actor import bucket_reading
from millrace.actor.bucket_reading import BucketUnreadable, read_bucket
from millrace.actor.buckets import ensure_bucket
from millrace.actor.nats_client import settle
from millrace.contracts.catalog import BUCKETS, CHANNELS, Role
from millrace.contracts.permissions import store_permissions, store_user
from nats.aio.client import Client
from nats.errors import NoRespondersError

from tests.live.role_users import SUBJECTS, connected, example, role_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    process = role_server(tmp_path_factory.mktemp("nats"))
    process.start()
    yield process.url
    process.close()


async def refusals(client: Client, errors: list[str]) -> list[str]:
    """Return what the server has refused so far."""
    await settle(client)
    return [error for error in errors if "permissions violation" in error.lower()]


@pytest.mark.parametrize("role", list(Role))
async def test_a_role_may_publish_and_subscribe_to_what_the_catalog_says_and_nothing_else(
    server: str, role: Role
) -> None:
    reads_all = role in (Role.OBSERVER, Role.OPERATOR, Role.SUPERVISOR)
    errors: list[str] = []
    async with connected(server, role, errors) as client:
        for channel in CHANNELS:
            await client.publish(example(channel.subject), b"x")
            await client.subscribe(example(channel.subject))
        refused = await refusals(client, errors)
    for channel in CHANNELS:
        named = [error for error in refused if f'"{example(channel.subject)}"' in error]
        published, heard = (
            any(f"for {what}" in each.lower() for each in named) for what in ("publish", "subscription")
        )
        assert published == (role not in channel.senders), f"{role} publishing on {channel.name}"
        assert heard == (role not in channel.receivers and not reads_all), f"{role} subscribing to {channel.name}"


@pytest.mark.parametrize("subject", ["mr.other.tokens.x", ">", "_INBOX.ingress.x", "$SYS.REQ.SERVER.PING"])
async def test_nobody_reads_beyond_their_own(server: str, subject: str) -> None:
    errors: list[str] = []
    async with connected(server, Role.TAGGER, errors) as client:
        await client.subscribe(subject)
        assert await refusals(client, errors)


async def test_a_wrong_password_is_refused(server: str) -> None:
    with pytest.raises(nats.errors.Error):
        await nats.connect(server, user="ingress", password="wrong", allow_reconnect=False, max_reconnect_attempts=0)


async def test_a_worker_may_take_its_whole_inbox_with_one_subscription(server: str) -> None:
    for role, may in ((Role.WORKER, True), (Role.INGRESS, False), (Role.COORDINATOR, False)):
        errors: list[str] = []
        async with connected(server, role, errors) as client:
            await client.subscribe(SUBJECTS.engine("a", "*"))
            assert bool(await refusals(client, errors)) == (not may), role


# the key-value store, which has users and accounts of its own


@pytest.fixture
async def buckets(server: str) -> None:
    async with connected(server, store_user(Role.SUPERVISOR)) as client:
        for bucket in BUCKETS:
            await ensure_bucket(client.jetstream(), name=bucket.name, cluster="local")
        for key, value in (("m", b"a plan"), ("n", b"old"), ("n", b"new")):
            await client.publish(f"$KV.{SUBJECTS.bucket('plan')}.{key}", value)
        await client.publish(f"$KV.{SUBJECTS.bucket('plan')}.o", b"", headers={"KV-Operation": "DEL"})
        await settle(client)


#: But the supervisor, which keeps the store.
STORE_ROLES = [role for role in Role if role is not Role.SUPERVISOR and store_permissions(role, "local").publish]


@pytest.mark.parametrize("role", STORE_ROLES)
async def test_a_role_writes_and_reads_the_buckets_that_the_catalog_says(
    server: str, buckets: None, role: Role, monkeypatch: pytest.MonkeyPatch
):
    errors: list[str] = []
    async with connected(server, store_user(role), errors) as client:
        for bucket in BUCKETS:
            await client.publish(f"$KV.{SUBJECTS.bucket(bucket.name)}.x", b"", headers={"KV-Operation": "DEL"})
        refused = await refusals(client, errors)
        for bucket in BUCKETS:
            name = SUBJECTS.bucket(bucket.name)
            may_not = any(f'"$kv.{name}.x"' in error.lower() for error in refused)
            assert may_not == (role not in bucket.writers), f"{role} to {bucket.name}"
            texts = bucket.name in ("response", "response_log")  # what clients wrote
            if role in bucket.watchers or (role in (Role.OBSERVER, Role.OPERATOR) and not texts):
                await read_bucket(client, name)
                continue
            monkeypatch.setattr(bucket_reading, "PAUSE_S", 0.2)  # nobody answers
            with pytest.raises((BucketUnreadable, NoRespondersError)):
                await read_bucket(client, name)
            monkeypatch.undo()


@pytest.mark.parametrize("role", STORE_ROLES)
async def test_no_role_manages_streams_or_consumers_of_the_store(server: str, buckets: None, role: Role):
    stream = f"KV_{SUBJECTS.bucket('plan')}"
    for call in ("INFO", f"STREAM.DELETE.{stream}", f"STREAM.MSG.GET.{stream}", f"CONSUMER.CREATE.{stream}"):
        errors: list[str] = []
        async with connected(server, store_user(role), errors) as client:
            await client.publish(f"$JS.API.{call}", b"")
            assert await refusals(client, errors), f"{role} on {call}"


async def test_what_is_read_is_the_last_value_of_each_key_that_was_not_deleted(server: str, buckets: None):
    async with connected(server, store_user(Role.OBSERVER)) as client:
        assert await read_bucket(client, SUBJECTS.bucket("plan")) == [b"a plan", b"new"]
        assert await read_bucket(client, SUBJECTS.bucket("lease")) == []


async def test_a_large_bucket_is_read_in_several_answers(server: str, buckets: None):
    name, count = SUBJECTS.bucket("instance"), 1200
    async with connected(server, store_user(Role.SUPERVISOR)) as client:
        for index in range(count - 1):
            await client.publish(f"$KV.{name}.i{index}", str(index).encode())
        await client.request(f"$KV.{name}.i{count - 1}", str(count - 1).encode())  # all before it are stored, too
    async with connected(server, store_user(Role.OBSERVER)) as client:
        assert await read_bucket(client, name) == [str(index).encode() for index in range(count)]


async def test_a_bucket_that_is_not_there_is_unreadable(server: str, buckets: None):
    async with connected(server, store_user(Role.SUPERVISOR)) as client:
        with pytest.raises(BucketUnreadable):
            await read_bucket(client, "mr_local_nothing")


async def test_a_bucket_of_an_earlier_version_is_made_readable(server: str, buckets: None):
    name = SUBJECTS.bucket("plan")
    async with connected(server, store_user(Role.SUPERVISOR)) as client:
        stream = client.jetstream()
        info = await stream.stream_info(f"KV_{name}")
        info.config.republish = None
        await stream.update_stream(info.config, allow_direct=False)
        await ensure_bucket(stream, name="plan", cluster="local")
        info = await stream.stream_info(f"KV_{name}")
        assert info.config.allow_direct
        assert info.config.republish.dest == f"{SUBJECTS.changes('plan')}>"
