"""Instances come with load and go without it, and no request notices: a whole cluster with modelled engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import nats
import pytest
from millrace.contracts.codec import decode
from millrace.contracts.observers import ProvisioningDecided, RequestFinished
from millrace.contracts.subjects import Subjects

from tests.live.clusters import modelled_cluster
from tests.live.faults import expect_identical, undisturbed
from tests.testbed.timed_streams import client
from tests.testbed.up_cluster import UpRig, offer_during, prompt_text, stream
from tests.testbed.waiting import until

#: Four places in the batch and 32 ms per step: one instance serves four such requests a second, whatever else runs.
WORKER = {"max_num_seqs": 4, "modelled": {"coefficients": "cpu-100m", "speed": 0.5}, "limits": {"linger_ms": 200}}
PARAMETERS = {"threshold_s": 2.5, "cooldown_s": 2.0, "low_utilisation": 0.3, "low_s": 2.0}
LENGTH = {"max_tokens": 30, "ignore_eos": True}
WAIT_S = 60.0


rig = modelled_cluster(
    *("--provision", "preempt", "--instances-max", "3", "--policy", "forecast"),
    *("--set", "policies.provisioning.parameters=" + json.dumps(PARAMETERS)),
    *("--set", "coordinator.provisioning.drain_limit_s=1.0"),
    instances=1,
    worker=WORKER,
)


class Watch:
    """Decisions and outcomes that the cluster publishes, as an observer hears them."""

    def __init__(self) -> None:
        self.decisions: list[ProvisioningDecided] = []
        self.outcomes: list[RequestFinished] = []

    async def start(self, rig: UpRig) -> Watch:
        known = rig.cluster_file()
        user, password = known["observer_user"], known["observer_password"]
        self.client = await nats.connect(
            known["nats_url"], user=user, password=password, inbox_prefix=f"_INBOX.{user}".encode()
        )
        subjects = Subjects(known["cluster"])
        await self.client.subscribe(subjects.provisioning(rig.model), cb=self._keep(self.decisions))
        await self.client.subscribe(subjects.outcome(rig.model), cb=self._keep(self.outcomes))
        await self.client.flush()
        return self

    def _keep(self, into: list[Any]) -> Callable[[Any], Any]:
        async def hear(message: Any) -> None:
            into.append(decode(message.data))

        return hear


async def test_instances_are_added_under_load_used_and_drained_after_it_without_a_failed_request(rig: UpRig) -> None:
    expected = await undisturbed(rig, **LENGTH)
    watch = await Watch().start(rig)

    async def another_answers() -> None:
        await rig.until(lambda totals: totals.instances_ready >= 2, WAIT_S)
        await until(lambda: any("worker-1" in outcome.instances for outcome in watch.outcomes))

    expect_identical(await offer_during(rig, another_answers(), rate=7, prompts=8, **LENGTH), expected)
    starts = [decision for decision in watch.decisions if decision.action == "start"]
    assert starts
    assert starts[0].signal_ns is not None
    assert "predicted latency" in starts[0].reason
    assert {name for outcome in watch.outcomes for name in outcome.instances} >= {"worker-0", "worker-1"}

    trickle = asyncio.create_task(_trickle(rig, expected))
    await rig.until(lambda totals: totals.instances_ready == 1, WAIT_S)
    trickle.cancel()
    with pytest.raises(asyncio.CancelledError):
        await trickle
    stops = [name for decision in watch.decisions if decision.action == "stop" for name in decision.instances]
    assert stops
    assert not [outcome for outcome in watch.outcomes if outcome.outcome not in ("completed", "cancelled")]
    await until(lambda: not any(rig.pids(f"{name}.json") for name in stops), look_s=0.2)
    assert len(watch.decisions) <= 8, "it swings"
    await watch.client.close()


async def _trickle(rig: UpRig, expected: dict[int, tuple[str, str, int]]) -> None:
    """Two streams at a time, so that whoever is drained is likely to hold one."""
    async with client(60) as http:
        number = 0
        while True:
            pair = [(n % 8, stream(http, rig, prompt_text(n % 8), **LENGTH)) for n in (number, number + 1)]
            results = await asyncio.gather(*(work for _, work in pair))
            expect_identical([(n, r) for (n, _), r in zip(pair, results, strict=True)], expected)
            number += 2
