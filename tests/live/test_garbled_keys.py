"""Values that are none in the store of a running cluster: requests go on, and the keys are written anew."""

import os
import signal

import httpx
import msgspec
import nats
from millrace.actor.bucket_reading import read_bucket
from millrace.contracts.codec import MalformedMessage, decode
from millrace.contracts.permissions import store_user
from millrace.contracts.subjects import Subjects
from nats.aio.client import Client

from tests.live.clusters import modelled_cluster
from tests.live.faults import asked, until_served
from tests.testbed.up_cluster import UpRig
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
