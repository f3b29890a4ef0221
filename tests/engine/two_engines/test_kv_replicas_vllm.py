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


class Replicated:
    """Messages to ingress about replicas."""

    def __init__(self, rig: UpRig) -> None:
        self._rig = rig
        self.heard: list[KvReplicated] = []

    async def __aenter__(self) -> Replicated:
        self._bus = await self._rig.operator_bus()
        subject = Subjects(self._rig.cluster_file()["cluster"]).replicated("any").rpartition(".")[0]
        await self._bus.subscribe(f"{subject}.*", cb=self._hear)
        await self._bus.flush()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._bus.close()

    async def _hear(self, message: Msg) -> None:
        body = decode(message.data)
        assert isinstance(body, KvReplicated)
        self.heard.append(body)

    async def reaches(self, tokens: int) -> KvReplicated:
        """The first notice of so many tokens."""
        await until(lambda: self.heard and self.heard[-1].tokens >= tokens, look_s=0.005)
        return self.heard[-1]


async def test_a_killed_engines_stream_goes_on_from_its_replica(rig: UpRig) -> None:
    async with httpx.AsyncClient(timeout=120) as client:
        expected = await stream(client, rig, prompt_text(1), **LENGTH)
        assert not expected.error
        before = {name: await _total(rig, name) for name in COUNTED}  # a stream of another test may have had one
        async with Replicated(rig) as replicated:
            running = asyncio.create_task(stream(client, rig, prompt_text(1), **LENGTH))
            told = await replicated.reaches(KILLED_AT)
            source = "worker-1" if told.instance == "worker-0" else "worker-0"
            kill(rig.log_pids(source)[-1])
            result = await running
    assert not result.error
    assert result.outcome == expected.outcome
    added = {name: await _total(rig, name) - before[name] for name in COUNTED}
    assert (added["continuations"], added["replica_continuations"]) == (1, 1), rig.logs()
    assert added["replica_tokens"] >= KILLED_AT
    # What was decoded since the last notice, and the block that was not full.
    length = added["replica_tokens"] + added["replica_tail_tokens"]
    assert added["replica_tail_tokens"] <= length - told.tokens + BLOCK
    await rig.well(2)


async def _total(rig: UpRig, name: str) -> float:
    return await rig.metric(f"millrace_ingress_{name}_total")
