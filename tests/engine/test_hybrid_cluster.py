"""A model with sliding windows in a cluster of two real engines: drained under load, and prompts computed apart."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from millrace.contracts.broker import MoveReason
from millrace.contracts.migration import MigrationOutcome
from millrace.contracts.plan import InstanceRole

from tests.live.faults import PROMPTS, expect_identical, expected_outcomes
from tests.live.mover import Mover
from tests.testbed import moving_families
from tests.testbed.role_operator import RoleOperator
from tests.testbed.up_cluster import UpRig, offer, offer_during

pytestmark = pytest.mark.timeout(600)

#: Requests a second.
RATE = 4.0
#: Prompts have some 50 tokens: the window of 64 moves on while they are answered.
LENGTH: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpRig]:
    folder = tmp_path_factory.mktemp("hybrid")
    model = moving_families.build(folder / "model", moving_families.FAMILIES["gemma3"])
    extra = ("--policy", "round_robin", "--set", "worker.enforce_eager=true")
    with UpRig(folder / "c", model_path=model, engine="vllm", instances=2, extra=extra) as cluster:
        yield cluster


async def test_streams_are_handed_from_where_prompts_are_computed_to_where_text_is(rig: UpRig) -> None:
    expected = await expected_outcomes(rig, **LENGTH)
    async with RoleOperator(rig) as operator, Mover(rig, modes=()) as onlooker:
        await operator.flip("worker-0", InstanceRole.PREFILL)
        await operator.flip("worker-1", InstanceRole.DECODE)
        expect_identical(await offer(rig, rate=RATE, count=2 * PROMPTS, prompts=PROMPTS, **LENGTH), expected)
        await operator.flip("worker-1", InstanceRole.BOTH)
        await operator.flip("worker-0", InstanceRole.BOTH)
    moved = [body for body in onlooker.heard if body.outcome is MigrationOutcome.MOVED]
    handed = [body for body in moved if body.reason is MoveReason.HANDOFF]
    assert {(body.source, body.target) for body in handed} == {("worker-0", "worker-1")}
    assert len(handed) >= PROMPTS


async def test_streams_move_when_an_instance_is_drained_under_load(rig: UpRig) -> None:
    expected = await expected_outcomes(rig, **LENGTH)

    async def drain() -> None:
        await asyncio.sleep(2)
        await asyncio.to_thread(rig.cli, "drain", "worker-0")

    async with Mover(rig, modes=()) as onlooker:
        expect_identical(await offer_during(rig, drain(), rate=RATE, prompts=PROMPTS, **LENGTH), expected)
    assert [body for body in onlooker.heard if body.outcome is MigrationOutcome.MOVED]
