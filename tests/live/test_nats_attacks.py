"""The server itself writes where a client asks for an answer: no role may use that to write what it may not publish.

A real nats-server with the configuration that ``millrace up`` writes; every attack with every user of every role.
"""

import json
from collections.abc import Iterator

import pytest
from millrace.actor.buckets import ensure_bucket
from millrace.actor.nats_client import settle
from millrace.contracts.catalog import BUCKETS, CHANNELS, Role
from millrace.contracts.permissions import key_subject, permissions, store_permissions, store_user
from millrace.contracts.subjects import covers
from nats.aio.client import Client

from tests.live.role_users import SUBJECTS, connected, example, role_server

NAMES = [bucket.name for bucket in BUCKETS]
#: For thousands of attacks, whatever else this machine does.
PATIENCE_S = 60.0

#: Whose user gets the permissions of other roles as well, where it hosts them; no other role's user changes with that.
HOSTED = {Role.INGRESS: (Role.TAGGER, Role.PREDICTOR, Role.MIGRATOR, Role.BROKER), Role.MIGRATOR: (Role.BROKER,)}


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    process = role_server(tmp_path_factory.mktemp("nats"), hosted=request.param)
    process.start()
    yield process.url
    process.close()


def users(role: Role) -> list[str]:
    """Names under which the role may connect."""
    return [
        str(role),
        *([store_user(role)] if role is Role.SUPERVISOR or store_permissions(role, "local").publish else []),
    ]


def victims(role: Role, hosted: tuple[Role, ...]) -> list[str]:
    """Subjects on which nothing of this role's may appear."""
    allowed = [given(each, "local") for each in (role, *hosted) for given in (permissions, store_permissions)]
    subjects = [
        # The supervisor makes the buckets: whatever is written there, it may have written.
        *(f"{key_subject(SUBJECTS, name)}.evil" for name in NAMES if role is not Role.SUPERVISOR),
        *(f"{SUBJECTS.changes(name)}evil" for name in NAMES if role is not Role.SUPERVISOR),
        *(example(channel.subject, "evil") for channel in CHANNELS),
        *(f"_INBOX.{name}.evil" for other in Role if other not in (role, *hosted) for name in users(other)),
    ]
    return [subject for subject in subjects if not any(each.may_publish(subject) for each in allowed)]


def api_calls(bucket: str, victim: str) -> list[tuple[str, bytes]]:
    """Calls that JetStream answers, or delivers, on a subject that the asker names."""
    stream, keys = f"KV_{SUBJECTS.bucket(bucket)}", key_subject(SUBJECTS, bucket)
    push = {"deliver_subject": victim, "deliver_policy": "all", "ack_policy": "none"}
    consumer = json.dumps({"stream_name": stream, "config": push}).encode()
    named = json.dumps({"stream_name": stream, "config": {**push, "name": "evil", "durable_name": "evil"}}).encode()
    return [
        ("$JS.API.INFO", b""),
        (f"$JS.API.STREAM.INFO.{stream}", b""),
        ("$JS.API.STREAM.NAMES", b""),
        (f"$JS.API.STREAM.MSG.GET.{stream}", b'{"seq":1}'),
        (f"$JS.API.DIRECT.GET.{stream}", b'{"seq":1}'),
        (f"$JS.API.DIRECT.GET.{stream}", json.dumps({"multi_last": [f"{keys}.>"]}).encode()),
        (f"$JS.API.DIRECT.GET.{stream}", json.dumps({"seq": 1, "next_by_subj": f"{keys}.>", "batch": 9}).encode()),
        (f"$JS.API.DIRECT.GET.{stream}.{keys}.standing", b""),
        (f"$JS.API.CONSUMER.CREATE.{stream}", consumer),
        (f"$JS.API.CONSUMER.CREATE.{stream}.evil", named),
        (f"$JS.API.CONSUMER.DURABLE.CREATE.{stream}.evil", named),
        (f"{keys}.own", b"an acknowledgement is an answer too"),
    ]


async def attack(client: Client, victim: str) -> None:
    """Everything that might make the server write on ``victim``."""
    await client.publish(victim, b"directly")
    for bucket in NAMES:
        for subject, body in api_calls(bucket, victim):
            await client.publish(subject, body, reply=victim)
    for subject in (example("decision.{model}", "evil"), f"{key_subject(SUBJECTS, 'instance')}.own", "_INBOX.x"):
        await client.publish(subject, b"", headers={"Nats-Trace-Dest": victim})


@pytest.mark.parametrize(
    ("server", "role"),
    [*(({}, role) for role in Role), *((HOSTED, role) for role in HOSTED)],
    indirect=["server"],
    ids=[*Role, *(f"{role} with others" for role in HOSTED)],
)
async def test_no_role_writes_by_the_server_s_hand_what_it_may_not_publish(
    server: str, role: Role, request: pytest.FixtureRequest
) -> None:
    targets = victims(role, request.node.callspec.params["server"].get(role, ()))
    heard: list[str] = []

    async def hear(message: object) -> None:
        heard.append(message.subject)  # type: ignore[attr-defined]

    await make_buckets(server)
    names = [name for other in Role for name in users(other)]
    listeners = [connected(server, name) for name in names]
    async with connected(server, Role.OBSERVER) as observer:
        await observer.subscribe(f"{SUBJECTS.prefix}.>", cb=hear)
        opened = [await listener.__aenter__() for listener in listeners]
        for name, client in zip(names, opened, strict=True):
            await client.subscribe(f"_INBOX.{name}.evil", cb=hear)
            if name != store_user(role):  # processes of one role share their account
                for bucket in NAMES:
                    await client.subscribe(f"{SUBJECTS.changes(bucket)}evil", cb=hear)
            await settle(client, PATIENCE_S)
        for name in users(role):
            async with connected(server, name) as attacker:
                for victim in targets:
                    await attack(attacker, victim)
                await settle(attacker, PATIENCE_S)
        await settle(observer, PATIENCE_S)
        for client in opened:
            await settle(client, PATIENCE_S)
            await client.close()
    assert not [subject for subject in heard if subject in targets]
    written = await keys_in_buckets(server)
    assert not [target for target in targets if any(covers(target, key) for key in written)]


async def make_buckets(server: str) -> None:
    async with connected(server, store_user(Role.SUPERVISOR)) as keeper:
        for name in NAMES:
            await ensure_bucket(keeper.jetstream(), name=name, cluster="local")
            await keeper.jetstream().publish(f"{key_subject(SUBJECTS, name)}.standing", b"a value")


async def keys_in_buckets(server: str) -> list[str]:
    found: list[str] = []
    async with connected(server, store_user(Role.SUPERVISOR)) as keeper:
        for name in NAMES:
            info = await keeper.jetstream(timeout=PATIENCE_S).stream_info(
                f"KV_{SUBJECTS.bucket(name)}", subjects_filter=">"
            )
            found += info.state.subjects or {}
    return found
