"""Three NATS servers: each is restarted and each is killed under load, and no request, plan or lease is lost."""

import asyncio
import os
import signal

from tests.live.clusters import modelled_cluster
from tests.live.faults import PROMPTS, expect_identical, told, undisturbed
from tests.testbed.up_cluster import UpRig, offer_during
from tests.testbed.waiting import until

LENGTH = {"max_tokens": 120, "ignore_eos": True}
WORKER = {"max_num_seqs": 16, "kv_blocks": 2048, "modelled": {"speed": 0.1}}


rig = modelled_cluster("--processes", "3", "--set", "nats.servers=3", instances=3, worker=WORKER)


async def one_after_the_other(rig: UpRig) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        for name in ("nats-0", "nats-1", "nats-2"):
            (pid,) = rig.pids(f"{name}.conf")
            often = rig.output().count(f"{name} ready")
            os.kill(pid, number)
            await until(
                lambda name=name, often=often: rig.output().count(f"{name} ready") > often
            )  # its store is whole
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
