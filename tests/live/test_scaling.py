"""`millrace scale` on a live cluster with modelled engines: 2 to 3 to 1 under load, and no request fails."""

import asyncio
import json

from tests.live.clusters import modelled_cluster
from tests.live.faults import expect_identical, told, undisturbed
from tests.testbed.up_cluster import UpRig, offer_during

WORKER = {"max_num_seqs": 8, "kv_blocks": 2048, "modelled": {"speed": 0.3}, "limits": {"linger_ms": 200}}
LENGTH = {"max_tokens": 90, "ignore_eos": True}


rig = modelled_cluster("--instances-max", "3", worker=WORKER)


async def scaled(rig: UpRig, *words: str) -> str:
    return await asyncio.to_thread(rig.cli, "scale", rig.model, *words)


async def up_and_down(rig: UpRig) -> None:
    said = await scaled(rig, "3", "--shape", "cpu", "--role", "decode")
    assert "refused (no_device): at_bound" in said or "worker-2" in said, said
    assert "one more not" in said, "none decodes yet: three were asked for, one spare is there"
    assert "worker-2 begins" in said
    assert said.splitlines()[-1].endswith("worker-2 is ready"), said
    status = json.loads(await asyncio.to_thread(rig.cli, "status", "--json"))
    rows = {row["instance"]: row for row in status["instances"]}
    assert (rows["worker-2"]["role"], rows["worker-2"]["shape"]) == ("decode", "cpu")
    assert "refused (no_device): at_bound: 3 instances of m are the bound" in await scaled(rig, "+1")
    assert "refused (unknown_shape)" in await scaled(rig, "1", "--shape", "h100x2")
    assert "refused (not_capable)" in await scaled(rig, "0")
    said = await scaled(rig, "1")
    assert "drains, empty within" in said
    assert said.count("is gone") == 2, said


async def test_up_and_down_under_load_costs_no_request(rig: UpRig) -> None:
    expected = await undisturbed(rig, **LENGTH)
    expect_identical(await offer_during(rig, up_and_down(rig), rate=4, prompts=8, **LENGTH), expected)
    await told(rig, instances_ready=1, running=0, waiting=0, blocks_used=0)
