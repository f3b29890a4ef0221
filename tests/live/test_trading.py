"""Brokers hand running requests on through stages of modelled engines, each with worker and migrator in processes of
their own, on a real nats-server, under load.
"""

import asyncio

import pytest
from millrace.contracts.broker import MoveReason
from millrace.contracts.migration import MigrationFinished, MigrationOutcome

from tests.live.clusters import modelled_cluster
from tests.live.faults import Outcomes, expect_identical, told, undisturbed
from tests.live.mover import Mover
from tests.testbed.up_cluster import UpRig, offer

INSTANCES = 4
#: Slow enough that there is always something to move, whatever else this machine does.
WORKER = {"kv_blocks": 2048, "max_num_seqs": 32, "modelled": {"speed": 0.35}, "limits": {"linger_ms": 200}}
#: Sequences of these tests last a few seconds: they leave at the boundary itself.
BROKER = {"fences": {"payback_factor": 0}}
#: Has cuts at 176, 256 and 368 tokens.
CONTEXT_TOKENS = 512
#: Passes two of them: prompts are about 45 tokens long.
LONG = {"max_tokens": 230, "ignore_eos": True}

rig = modelled_cluster(
    *("--processes", str(INSTANCES), "--stages", "4", "--trading", "papers/cascadeinfer/trading.py"),
    instances=INSTANCES,
    max_model_len=CONTEXT_TOKENS,
    worker=WORKER,
    broker=BROKER,
)


@pytest.fixture(scope="module")
def expected(rig: UpRig) -> Outcomes:
    return asyncio.run(undisturbed(rig, **LONG))


def moved(onlooker: Mover) -> list[MigrationFinished]:
    return [body for body in onlooker.heard if body.outcome is MigrationOutcome.MOVED]


async def expect_empty(rig: UpRig) -> None:
    """Nothing runs and no block is in use anywhere."""
    await told(rig, running=0, waiting=0, blocks_used=0)


async def test_requests_flow_up_the_stages_and_no_reader_notices(rig: UpRig, expected: Outcomes) -> None:
    async with Mover(rig, modes=()) as onlooker:
        results = await offer(rig, rate=10, count=24, prompts=8, **LONG)
    expect_identical(results, expected)
    assert len(moved(onlooker)) >= 18
    assert {body.reason for body in moved(onlooker)} <= {MoveReason.BOUNDARY, MoveReason.BALANCE}
    assert all(body.award for body in moved(onlooker)), "each move follows a bid"
    await expect_empty(rig)
