"""Three NATS servers: each is restarted and each is killed under load, and no request, plan or lease is lost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live.faults import PATIENCE_S, PROMPTS, expect_identical, told, undisturbed
from tests.live.ingress_rig import write_model_folder
from tests.testbed.up_cluster import UpRig, offer_during

LENGTH = {"max_tokens": 120, "ignore_eos": True}
WORKER = {"max_num_seqs": 16, "kv_blocks": 2048, "modelled": {"speed": 0.1}}


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[UpRig]:
    options = ["--processes", "3", "--set", "nats.servers=3", "--set", "worker=" + json.dumps(WORKER)]
    model = write_model_folder(tmp_path / "model")
    with UpRig(tmp_path / "cluster", model_path=model, engine="modelled", instances=3, extra=options) as cluster:
        yield cluster


async def one_after_the_other(rig: UpRig) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        for name in ("nats-0", "nats-1", "nats-2"):
            (pid,) = rig.pids(f"{name}.conf")
            often = rig.output().count(f"{name} ready")
            os.kill(pid, number)
            async with asyncio.timeout(PATIENCE_S):
                while rig.output().count(f"{name} ready") == often:  # noqa: ASYNC110 - until its store is whole again
                    await asyncio.sleep(0.05)
            await told(rig, instances_ready=3)
    for name in ("nats-0", "nats-1"):  # the majority at once
        os.kill(rig.pids(f"{name}.conf")[0], signal.SIGKILL)


async def test_any_server_may_end_under_load(rig: UpRig) -> None:
    expected = await undisturbed(rig, **LENGTH)
    results = await offer_during(rig, one_after_the_other(rig), rate=2, prompts=PROMPTS, **LENGTH)
    print(f"{len(results)} streams, longest pause {max(result.pause_s for _, result in results):.2f} s")
    expect_identical(results, expected)
    for _ in range(3):  # the plan may change once more after the last server came back: the command then says so
        said = await asyncio.to_thread(rig.cli, "role", "worker-2", "decode")
        if "refused (old_plan)" not in said:
            break
    assert "worker-2 does decode" in said, said
    await told(rig, instances_ready=3, running=0, waiting=0, blocks_used=0)
