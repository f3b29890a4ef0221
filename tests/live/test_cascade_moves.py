"""Engines of a cascade change their model while it serves: three models on two devices, and no request notices."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from millrace.actor.bucket_reading import read_bucket
from millrace.contracts.cascade import CascadeMove, CascadePlan
from millrace.contracts.codec import decode, encode
from millrace.contracts.subjects import Subjects, subject_token

from testbed.timed_streams import client
from testbed.up_cluster import UpRig, prompt_text
from tests.live.cascading import swap_thresholds
from tests.live.ingress_rig import write_model_folder

CASCADE = "auto"
TIERS = ("small", "middle", "large")
WAIT_S = 60.0

CLUSTER = """
[devices]
cpu = 2

[cascade]
name = "auto"
tiers = ["small", "middle", "large"]
"""
CLUSTER += "".join(
    f"""
[[models]]
name = "{name}"
path = "{name}"

[[models.groups]]
name = "{name}"
engine = "modelled"
count = {count}
spares = {1 - count}
"""
    for name, count in zip(TIERS, (1, 0, 1), strict=True)
)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpRig]:
    folder = tmp_path_factory.mktemp("moves")
    for name in TIERS:
        write_model_folder(folder / name)
    (folder / "cluster.toml").write_text(CLUSTER)
    cluster = UpRig.of_words(folder / "cluster", ["--cluster", str(folder / "cluster.toml")], model=CASCADE)
    cluster.start()
    yield cluster
    cluster.stop()


class CascadePlanStore:
    """The cascade's plan in the cluster's store, as an operator reads and writes it."""

    def __init__(self, client: Any, cluster: str) -> None:
        self._client = client
        self._bucket = Subjects(cluster).bucket("cascade")

    @classmethod
    async def of(cls, rig: UpRig) -> CascadePlanStore:
        return cls(await rig.operator_bus(store=True), rig.cluster_file()["cluster"])

    async def read(self) -> CascadePlan:
        [plan] = [decode(value) for value in await read_bucket(self._client, self._bucket)]
        assert isinstance(plan, CascadePlan)
        return plan

    async def move(self, *instances: int) -> None:
        """Has the engines change to these counts, by tier and last of the judging model."""
        plan = await self.read()
        before = [sum(each.count for each in tier.replicas) for tier in plan.members]
        move = CascadeMove(
            instances=list(instances),
            before=before,
            until_ns=time.time_ns() + 60_000_000_000,
            thresholds=[0.0] * len(plan.tiers),
        )
        told = msgspec.structs.replace(plan, epoch=plan.epoch + 1, move=move, coordinator="operator")
        await self._client.jetstream().publish(f"$KV.{self._bucket}.{subject_token(CASCADE)}", encode(told))

    async def settled(self, rig: UpRig, *instances: int) -> CascadePlan:
        """The plan once it has these instances and no move."""
        deadline = time.monotonic() + WAIT_S
        while True:
            plan = await self.read()
            counts = tuple(sum(each.count for each in tier.replicas) for tier in plan.members)
            if plan.move is None and counts == instances:
                return plan
            assert time.monotonic() < deadline, f"{plan}\n{rig.cli('status')}{rig.logs()}"
            await asyncio.sleep(0.1)

    async def close(self) -> None:
        await self._client.close()


class CascadeLoad:
    """Requests of the cascade, one after the other in each of some lanes, until it is stopped.

    Attributes:
        answers: Bodies, or errors.
    """

    def __init__(self, rig: UpRig, lanes: int = 3) -> None:
        self.answers: list[tuple[int, dict[str, Any]]] = []
        self._rig = rig
        self._on = True
        self._tasks = [asyncio.create_task(self._run(lane)) for lane in range(lanes)]

    async def _run(self, lane: int) -> None:
        async with client(60) as http:
            number = 0
            while self._on:
                body = {"model": CASCADE, "prompt": prompt_text(lane * 10 + number % 8), "max_tokens": 12}
                answer = await http.post(f"{self._rig.url}/v1/completions", json=body)
                self.answers.append((answer.status_code, answer.json()))
                number += 1
                await asyncio.sleep(0.05)

    async def answered_by(self, model: str) -> None:
        """Waits until this model has answered a request from now on."""
        known = len(self.answers)
        deadline = time.monotonic() + WAIT_S
        while all(body.get("model") != model for _, body in self.answers[known:]):
            assert time.monotonic() < deadline, self.answers[-3:]
            await asyncio.sleep(0.02)

    async def stop(self) -> None:
        self._on = False
        await asyncio.gather(*self._tasks)
        wrong = [answer for answer in self.answers if answer[0] != 200]
        assert not wrong, wrong[:3]


def instances(rig: UpRig) -> dict[str, str]:
    """Model of each instance that is ready."""
    rows = json.loads(rig.cli("status", "--json"))["instances"]
    return {row["instance"]: row["model"] for row in rows if row["state"] == "ready"}


@pytest.mark.timeout(200)
async def test_engines_change_their_model_under_load_and_no_request_fails(rig: UpRig) -> None:
    plans = await CascadePlanStore.of(rig)
    await plans.settled(rig, 1, 0, 1)
    load = CascadeLoad(rig)
    await swap_thresholds(rig, CASCADE, 100.0, 100.0)
    await load.answered_by("large")
    for counts, first in (((0, 1, 1), "middle"), ((1, 1, 0), "small")):
        await plans.move(*counts)
        plan = await plans.settled(rig, *counts)
        assert [tier.threshold for tier in plan.tiers] == [0.0] * 3
        served = sorted(instances(rig).values())
        assert served == sorted(name for name, count in zip(TIERS, counts, strict=True) for _ in range(count))
        await load.answered_by(first)
    await load.stop()
    async with client(60) as http:
        ready = await http.get(f"{rig.url}/ready")
        assert (ready.status_code, ready.json()["models_without_instance"]) == (200, [])
        listed = {card["id"]: card for card in (await http.get(f"{rig.url}/v1/models")).json()["data"]}
        assert {name: card.get("planned", True) for name, card in listed.items()} == {
            "small": True,
            "middle": True,
            "large": False,
            CASCADE: True,
        }
    await plans.close()


@pytest.mark.timeout(200)
async def test_a_move_goes_on_after_the_coordinator_was_killed(rig: UpRig) -> None:
    plans = await CascadePlanStore.of(rig)
    await plans.settled(rig, 1, 1, 0)
    load = CascadeLoad(rig)
    await load.answered_by("small")
    await plans.move(1, 0, 1)
    await asyncio.sleep(0.3)
    (pid,) = rig.pids("services.coordinator")
    os.kill(pid, signal.SIGKILL)
    await plans.settled(rig, 1, 0, 1)
    await load.answered_by("small")
    await load.stop()
    await plans.close()
