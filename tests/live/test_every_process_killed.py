"""Two ingresses, two coordinators, two predictors, an engine and a migrator more than needed, three NATS servers: every
process is killed in turn under load. What runs at a killed ingress breaks and is asked again; nothing else is noticed.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx

from tests.live.faults import PATIENCE_S, PROMPTS, expect_identical, kill, told, undisturbed
from tests.live.ingress_rig import write_model_folder
from tests.testbed.timed_streams import TimedStream, client
from tests.testbed.up_cluster import UpRig, prompt_text, stream

LENGTH = {"max_tokens": 60, "ignore_eos": True}
WORKER = {"max_num_seqs": 16, "kv_blocks": 2048, "modelled": {"speed": 0.1}}
SETTINGS = (
    "nats.servers=3",
    "services.ingresses=2",
    "services.coordinators=2",
    "services.predictors=2",
    "services.hosted_instances_max=0",
    "worker=" + json.dumps(WORKER),
)
INGRESSES = ("ingress-0", "ingress-1")
RATE = 2.0


def names(rig: UpRig) -> list[str]:
    """Every process of the cluster, as its configuration file is called."""
    found = {re.search(r"run/([a-z]+-\d+)\.(json|conf)", " ".join(process.cmdline())) for process in rig.processes()}
    return sorted({match[1] for match in found if match})


async def killed_in_turn(rig: UpRig, victims: list[str]) -> None:
    for name in victims:
        before = rig.pids(f"/{name}.")
        often = rig.output().count(f"{name} ready")
        kill(before[0])
        async with asyncio.timeout(PATIENCE_S):
            while rig.output().count(f"{name} ready") == often:  # noqa: ASYNC110 - until it is back
                await asyncio.sleep(0.05)
        await told(rig, instances_ready=3)
        assert rig.pids(f"/{name}.") != before


async def answered(http: httpx.AsyncClient, rig: UpRig, number: int, broken: list[str]) -> TimedStream:
    """As a client that asks again where its connection broke."""
    while True:
        result = await stream(http, rig, prompt_text(number), **LENGTH)
        if not re.match(r"[A-Z]\w+Error: ", result.error):
            return result
        broken.append(result.error)


async def offered(rig: UpRig, work: Any, broken: list[str]) -> list[tuple[int, TimedStream]]:
    async with client(120) as http:
        doing, tasks = asyncio.create_task(work), []
        while not doing.done():
            number = len(tasks) % PROMPTS
            tasks.append((number, asyncio.create_task(answered(http, rig, number, broken))))
            await asyncio.wait([doing], timeout=1 / RATE)
        results = [(number, await task) for number, task in tasks]
        await doing
        return results


async def test_any_one_process_may_be_killed_and_only_connections_of_a_killed_ingress_break(tmp_path: Path) -> None:
    model = write_model_folder(tmp_path / "model")
    options = ["--processes", "3", *(word for setting in SETTINGS for word in ("--set", setting))]
    with UpRig(tmp_path / "cluster", model_path=model, engine="modelled", instances=3, extra=options) as rig:
        expected = await undisturbed(rig, **LENGTH)
        every, broken = names(rig), []
        kinds = [name.rpartition("-")[0] for name in every]
        once = {"tagger": 1}
        for kind in ("nats", "coordinator", "predictor", "worker", "migrator", "ingress", "tagger"):
            assert kinds.count(kind) >= once.get(kind, 2), every
        others = [name for name in every if name not in INGRESSES]
        expect_identical(await offered(rig, killed_in_turn(rig, others), broken), expected)
        assert not broken
        expect_identical(await offered(rig, killed_in_turn(rig, list(INGRESSES)), broken), expected)
        await told(rig, instances_ready=3, running=0, waiting=0, blocks_used=0)
