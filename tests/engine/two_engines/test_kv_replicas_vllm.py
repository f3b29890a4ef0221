"""KV replicas with real vLLM: the engine of a long stream is killed, and the stream goes on from its replica."""

from __future__ import annotations

import asyncio

import httpx
from millrace.contracts.codec import decode
from millrace.contracts.migration import KvReplicated
from millrace.contracts.subjects import Subjects
from nats.aio.msg import Msg

from tests.live.faults import kill
from tests.testbed.up_cluster import UpRig, prompt_text, stream
from tests.testbed.waiting import until

#: Longer than what sequences get a replica from, by enough to be killed in between.
LENGTH = {"max_tokens": 640, "ignore_eos": True}
#: Tokens that the replica has when its source is killed; a third of the stream is still to come.
KILLED_AT = 448
BLOCK = 32

COUNTED = ("continuations", "replica_continuations", "replica_tokens", "replica_tail_tokens")


async def test_a_killed_engines_stream_goes_on_from_its_replica(rig: UpRig) -> None:
    heard: list[KvReplicated] = []

    async def hear(message: Msg) -> None:
        heard.append(decode(message.data))

    async with httpx.AsyncClient(timeout=120) as client, await rig.operator_bus() as bus:
        expected = await stream(client, rig, prompt_text(1), **LENGTH)
        assert not expected.error
        before = {name: await _total(rig, name) for name in COUNTED}  # a stream of another test may have had one
        subject = Subjects(rig.cluster_file()["cluster"]).replicated("any").rpartition(".")[0]
        await bus.subscribe(f"{subject}.*", cb=hear)
        await bus.flush()
        running = asyncio.create_task(stream(client, rig, prompt_text(1), **LENGTH))
        await until(lambda: heard and heard[-1].tokens >= KILLED_AT, look_s=0.005)
        told = heard[-1]
        kill(rig.log_pids("worker-1" if told.instance == "worker-0" else "worker-0")[-1])
        result = await running
    assert (result.error, result.outcome) == ("", expected.outcome)
    added = {name: await _total(rig, name) - before[name] for name in COUNTED}
    assert (added["continuations"], added["replica_continuations"]) == (1, 1), rig.logs()
    assert added["replica_tokens"] >= KILLED_AT
    # What was decoded since the last notice, and the block that was not full.
    length = added["replica_tokens"] + added["replica_tail_tokens"]
    assert added["replica_tail_tokens"] <= length - told.tokens + BLOCK
    await rig.well(2)


async def _total(rig: UpRig, name: str) -> float:
    return await rig.metric(f"millrace_ingress_{name}_total")
