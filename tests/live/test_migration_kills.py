"""Kill -9 of everybody who takes part at each step of a migration between modelled engines: no token and no block is
lost. tests/engine/two_engines does the worst of them with real ones.
"""

import asyncio

import pytest

from tests.live.clusters import modelled_cluster
from tests.testbed.migration_steps import (
    ASK,
    BID,
    END,
    FREEZE,
    LEASE,
    NATS,
    PREPARE,
    SOURCE,
    SOURCE_MIGRATOR,
    SUBMIT,
    TARGET,
    TARGET_MIGRATOR,
    kill_at,
    undisturbed,
)
from tests.testbed.up_cluster import UpRig

WORKER = {"kv_blocks": 2048, "max_num_seqs": 32, "modelled": {"speed": 0.7}, "limits": {"linger_ms": 200}}

KILLS = [
    *((SOURCE, step) for step in (LEASE, PREPARE, FREEZE, SUBMIT, END)),
    *((TARGET, step) for step in (BID, PREPARE, FREEZE, SUBMIT)),
    *((SOURCE_MIGRATOR, step) for step in (ASK, BID, PREPARE, FREEZE, SUBMIT, END)),
    *((TARGET_MIGRATOR, step) for step in (ASK, BID, PREPARE)),
    *((NATS, step) for step in (ASK, PREPARE, FREEZE, SUBMIT)),
]


rig = modelled_cluster("--processes", "2", "--policy", "round_robin", worker=WORKER)


@pytest.fixture(scope="module")
def expected(rig: UpRig) -> dict[int, str]:
    return asyncio.run(undisturbed(rig))


@pytest.mark.parametrize(("victim", "step"), KILLS, ids=[f"{v} at {s.replace('.*', '')}" for v, s in KILLS])
async def test_killing_it_in_a_migration_costs_no_token_and_no_block(
    rig: UpRig, expected: dict[int, str], victim: str, step: str
) -> None:
    await kill_at(rig, expected, victim, step)
