"""The store of a running cluster with values that are none, and with full buckets: requests go on, keys are written
anew, and of the responses the oldest go.
"""

import os
import signal

import httpx
import msgspec
import nats
import openai
import pytest
from millrace.actor.bucket_reading import read_bucket
from millrace.contracts.catalog import BUCKETS
from millrace.contracts.codec import MalformedMessage, decode, encode
from millrace.contracts.permissions import store_user
from millrace.contracts.responses import StoredResponse
from millrace.contracts.subjects import Subjects
from nats.aio.client import Client

from tests.live.clusters import modelled_cluster
from tests.live.faults import PROMPTS, asked, expect_identical, undisturbed, until_served
from tests.testbed.up_cluster import UpRig, offer_during
from tests.testbed.waiting import until

KEYS = {"plan": "m", "lease": "m", "instance": "worker-0"}
GARBAGE = b'{"type":"io.nats.jetstream.api.v1.account_info_response"}'
UNSERVED = "m is answered with 503: no plan of it could be read"


rig = modelled_cluster()


async def keeper(rig: UpRig) -> Client:
    """The one user that may write every key."""
    bus = msgspec.json.decode((rig.folder / "run" / "supervisor.json").read_bytes())["bus"]
    user = store_user(bus["user"])
    return await nats.connect(bus["servers"], user=user, password=bus["password"], inbox_prefix=f"_INBOX.{user}")


async def whole(client: Client) -> bool:
    for bucket in KEYS:
        for value in await read_bucket(client, Subjects("local").bucket(bucket)):
            try:
                decode(value)
            except MalformedMessage:
                return False
    return True


async def garble(client: Client) -> None:
    for bucket, key in KEYS.items():
        await client.publish(f"$KV.{Subjects('local').bucket(bucket)}.{key}", GARBAGE)
    await client.flush()


async def test_requests_go_on_and_owners_write_their_keys_anew_also_those_that_start_beside_such_values(
    rig: UpRig,
) -> None:
    client = await keeper(rig)
    await garble(client)
    assert [(await asked(rig))[0] for _ in range(20)] == [200] * 20
    await until(lambda: whole(client), look_s=0.1)
    for pid in (*rig.pids("services.coordinator"), *rig.pids("ingress-0.json")):
        os.kill(pid, signal.SIGKILL)
    await garble(client)
    await until_served(rig)
    await until(lambda: whole(client), look_s=0.1)
    await client.close()
    assert (await asked(rig))[0] == 200


async def test_while_no_plan_can_be_read_ready_and_status_say_what_clients_get(rig: UpRig) -> None:
    client = await keeper(rig)
    coordinators = rig.pids("services.coordinator")
    for pid in coordinators:
        os.kill(pid, signal.SIGSTOP)  # nobody writes it anew
    try:
        await garble(client)
        for pid in rig.pids("ingress-0.json"):
            os.kill(pid, signal.SIGKILL)
        await rig.until_said(lambda said: UNSERVED in said)
        async with httpx.AsyncClient(base_url=rig.url) as http:
            ready = await http.get("/ready")
        assert (ready.status_code, ready.json()["reasons"]) == (503, {"m": "no plan of it could be read"})
    finally:
        for pid in coordinators:
            os.kill(pid, signal.SIGCONT)
    await until_served(rig)
    await client.close()


async def fill(client: Client, name: str) -> None:
    """Puts as much into a bucket as it holds."""
    (most,) = [bucket.bytes_max for bucket in BUCKETS if bucket.name == name]
    value = encode(StoredResponse(holder="", status="completed", document=b"{}", input=bytes(900_000)))
    for number in range(most // len(value) + 1):
        await client.publish(f"$KV.{Subjects('local').bucket(name)}.resp_{number}", value)
        await client.flush(60)
    state = (await client.jetstream().stream_info(f"KV_{Subjects('local').bucket(name)}")).state
    assert most - len(value) < state.bytes <= most


async def test_full_buckets_drop_the_oldest_responses_and_no_stream_notices(rig: UpRig) -> None:
    fields = {"max_tokens": 60, "ignore_eos": True}

    async def filled() -> None:
        client = await keeper(rig)
        async with openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0, timeout=60) as asking:
            for bucket, said in (("response_log", "ask for it without `stream`"), ("response", "not found")):
                made = await asking.responses.create(model="m", input="a b", background=True, stream=True)
                events = [event async for event in made]
                identity = events[0].response.id
                assert [event async for event in await asking.responses.retrieve(identity, stream=True)] == events
                await fill(client, bucket)
                with pytest.raises(openai.APIError, match=said):
                    assert [event async for event in await asking.responses.retrieve(identity, stream=True)]
                kept = await asking.responses.create(model="m", input="a b")
                assert await asking.responses.retrieve(kept.id) == kept
        await client.close()

    expected = await undisturbed(rig, **fields)
    expect_identical(await offer_during(rig, filled(), rate=2, prompts=PROMPTS, **fields), expected)
