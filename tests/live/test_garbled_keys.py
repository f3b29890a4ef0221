"""Values that are none in the store of a running cluster: requests go on, and the keys are written anew."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import httpx
import msgspec
import nats
import pytest
from millrace.actor.bucket_reading import read_bucket
from millrace.contracts.codec import MalformedMessage, decode
from millrace.contracts.permissions import store_user
from millrace.contracts.subjects import Subjects
from nats.aio.client import Client

from tests.live.ingress_rig import write_model_folder
from tests.testbed.up_cluster import UpRig

KEYS = {"plan": "m", "lease": "m", "instance": "worker-0"}
GARBAGE = b'{"type":"io.nats.jetstream.api.v1.account_info_response"}'
PATIENCE_S = 20.0
UNSERVED = "m is answered with 503: no plan of it could be read"


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpRig]:
    folder = tmp_path_factory.mktemp("garbled")
    with UpRig(folder / "c", model_path=write_model_folder(folder / "model"), engine="modelled", instances=2) as made:
        yield made


async def keeper(rig: UpRig) -> Client:
    """The one user that may write every key."""
    bus = msgspec.json.decode((rig.folder / "run" / "supervisor.json").read_bytes())["bus"]
    user = store_user(bus["user"])
    return await nats.connect(bus["servers"], user=user, password=bus["password"], inbox_prefix=f"_INBOX.{user}")


async def ask(rig: UpRig) -> int:
    async with httpx.AsyncClient(base_url=rig.url, timeout=30) as client:
        try:
            return (
                await client.post("/v1/completions", json={"model": "m", "prompt": "a b", "max_tokens": 2})
            ).status_code
        except httpx.TransportError:
            return 0


async def whole(client: Client, bucket: str) -> bool:
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


async def until_whole(client: Client) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not all([await whole(client, bucket) for bucket in KEYS]):  # noqa: ASYNC110 nobody signals it
            await asyncio.sleep(0.1)


async def test_requests_go_on_and_owners_write_their_keys_anew(rig: UpRig) -> None:
    client = await keeper(rig)
    await garble(client)
    assert [await ask(rig) for _ in range(20)] == [200] * 20
    await until_whole(client)
    await client.close()


async def test_an_ingress_and_a_coordinator_that_start_beside_such_values_serve(rig: UpRig) -> None:
    client = await keeper(rig)
    for pid in (*rig.pids("services.coordinator"), *rig.pids("ingress-0.json")):
        os.kill(pid, signal.SIGKILL)
    await garble(client)
    async with asyncio.timeout(PATIENCE_S):
        while await ask(rig) != 200:  # noqa: ASYNC110 as above
            await asyncio.sleep(0.1)
    await until_whole(client)
    await client.close()
    assert await ask(rig) == 200


async def test_while_no_plan_can_be_read_ready_and_status_say_what_clients_get(rig: UpRig) -> None:
    client = await keeper(rig)
    coordinators = rig.pids("services.coordinator")
    for pid in coordinators:
        os.kill(pid, signal.SIGSTOP)  # nobody writes it anew
    try:
        await garble(client)
        for pid in rig.pids("ingress-0.json"):
            os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            while UNSERVED not in await asyncio.to_thread(rig.cli, "status"):  # noqa: ASYNC110 as above
                await asyncio.sleep(0.1)
        async with httpx.AsyncClient(base_url=rig.url) as http:
            ready = await http.get("/ready")
        assert (ready.status_code, ready.json()["reasons"]) == (503, {"m": "no plan of it could be read"})
    finally:
        for pid in coordinators:
            os.kill(pid, signal.SIGCONT)
    async with asyncio.timeout(PATIENCE_S):
        while await ask(rig) != 200:  # noqa: ASYNC110 as above
            await asyncio.sleep(0.1)
    await client.close()
