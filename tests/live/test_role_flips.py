"""Roles flip by order on a live cluster with modelled engines: under load, and while whoever takes part is killed."""

import asyncio
import time
from collections import Counter

import pytest
from millrace.cli.cluster_view import ClusterView
from millrace.contracts.broker import MoveReason
from millrace.contracts.coordinator import OrderAccepted
from millrace.contracts.migration import MigrationOutcome
from millrace.contracts.plan import InstanceRole

from tests.live.clusters import modelled_cluster
from tests.live.faults import Outcomes, expect_identical, kill, told, undisturbed
from tests.live.mover import Mover
from tests.testbed.role_operator import RoleOperator
from tests.testbed.up_cluster import UpRig, offer, offer_during

BOTH, PREFILL, DECODE = InstanceRole
INSTANCES = 3
WORKER = {"kv_blocks": 2048, "max_num_seqs": 32, "modelled": {"speed": 0.35}}
FLIPS = {"flips": {"gap_s": 1.0, "settle_s": 1.0, "drain_s": 2.0}}
LENGTH = {"max_tokens": 80, "ignore_eos": True}

rig = modelled_cluster(
    *("--processes", str(INSTANCES), "--roles", "worker-0=prefill,worker-1=decode"),
    instances=INSTANCES,
    worker=WORKER,
    coordinator=FLIPS,
)


@pytest.fixture(scope="module")
def expected(rig: UpRig) -> Outcomes:
    return asyncio.run(undisturbed(rig, **LENGTH))


async def has_role(rig: UpRig, instance: str, role: InstanceRole) -> None:
    """Waits until `status` shows that role."""

    def seen(view: ClusterView) -> bool:
        return any((row.instance, row.role) == (instance, role) for row in view.instances(time.time_ns()))

    await rig.until_seen(seen)


async def flip_to_and_fro(rig: UpRig) -> None:
    said = await asyncio.to_thread(rig.cli, "role", "worker-1", "prefill")
    assert "worker-1 does decode; worker-1 will be prefill" in said
    assert "worker-1 does both" in said
    assert said.splitlines()[-1].endswith("worker-1 does prefill"), said
    await has_role(rig, "worker-1", PREFILL)
    refused = await asyncio.to_thread(rig.cli, "role", "worker-2", "prefill")
    assert "refused (not_capable): with worker-2 as prefill its stage could not prefill, or not decode" in refused
    said = await asyncio.to_thread(rig.cli, "role", "worker-1", "decode")
    assert said.splitlines()[-1].endswith("worker-1 does decode"), said
    assert "no instance worker-9" in await asyncio.to_thread(rig.cli, "role", "worker-9", "both")


async def test_a_person_flips_an_instance_to_and_fro_under_load(rig: UpRig, expected: Outcomes) -> None:
    expect_identical(await offer_during(rig, flip_to_and_fro(rig), rate=4, prompts=8, **LENGTH), expected)
    assert "ordered to" not in rig.cli("status")
    await told(rig, running=0, waiting=0, blocks_used=0)


async def test_requests_enter_where_prompts_are_computed_and_are_handed_to_decode(
    rig: UpRig, expected: Outcomes
) -> None:
    async with RoleOperator(rig) as operator, Mover(rig, modes=()) as onlooker:
        await operator.flip("worker-2", DECODE)  # which leaves worker-0 alone with prompts
        expect_identical(await offer(rig, rate=8, count=24, prompts=8, **LENGTH), expected)
        await told(rig, running=0, waiting=0, blocks_used=0)
        await operator.flip("worker-2", BOTH)
    moved = [body for body in onlooker.heard if body.outcome is MigrationOutcome.MOVED]
    handed = Counter((body.source, body.target) for body in moved if body.reason is MoveReason.HANDOFF)
    assert {source for source, _ in handed} == {"worker-0"}
    assert {target for _, target in handed} <= {"worker-1", "worker-2"}


async def test_a_coordinator_that_dies_in_mid_flip_costs_no_request_and_the_flip_ends(
    rig: UpRig, expected: Outcomes
) -> None:
    async with RoleOperator(rig) as operator:

        async def killed_in_mid_flip() -> None:
            assert isinstance(await operator.order("worker-1", PREFILL), OrderAccepted)
            await operator.reaches("worker-1", BOTH)
            kill(rig.pids("coordinator-0.json")[0])
            await rig.well(INSTANCES)
            await operator.reaches("worker-1", PREFILL)

        expect_identical(await offer_during(rig, killed_in_mid_flip(), rate=6, prompts=8, **LENGTH), expected)
        await has_role(rig, "worker-1", PREFILL)
        await operator.flip("worker-1", DECODE)
        await has_role(rig, "worker-1", DECODE)
    await told(rig, running=0, waiting=0, blocks_used=0)
