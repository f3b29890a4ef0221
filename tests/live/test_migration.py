"""Running requests move between modelled engines, each with worker and migrator in processes of their own, on a real
nats-server: asked for by a person, by the dozen, and while instances drain.
"""

import asyncio
import os
import re
import signal

from millrace.contracts.broker import MoveReason
from millrace.contracts.migration import MigrationMode, MigrationOutcome

from tests.live.clusters import modelled_cluster
from tests.live.faults import expect_identical, expected_outcomes, shown, told
from tests.live.mover import Mover
from tests.testbed.timed_streams import client
from tests.testbed.up_cluster import UpRig, offer, offer_during, prompt_text, stream
from tests.testbed.waiting import until

INSTANCES = 3
LENGTH = {"max_tokens": 100, "ignore_eos": True}

#: Slow enough that there is always something to move, whatever else this machine does.
WORKER = {"kv_blocks": 2048, "max_num_seqs": 32, "modelled": {"speed": 0.25}, "limits": {"linger_ms": 200}}
#: A machine that stands still for a quarter of a second makes no difference.
MIGRATOR = {"limits": {"freeze_ms": 2_000}}
#: Five seconds of decoding: whoever has to act on a stream starts a process first.
LONG = {"max_tokens": 240, "ignore_eos": True}


OPTIONS = ("--processes", str(INSTANCES), "--policy", "round_robin")
rig = modelled_cluster(*OPTIONS, instances=INSTANCES, worker=WORKER, migrator=MIGRATOR)


async def expect_empty(rig: UpRig) -> None:
    """Nothing runs and no block is in use anywhere."""
    await told(rig, running=0, waiting=0, blocks_used=0)


async def test_a_person_moves_a_request_and_its_reader_does_not_notice(rig: UpRig) -> None:
    expected, own_id = await expected_outcomes(rig, **LONG), "a-clients-own.id"
    async with client(60, {"x-request-id": own_id}) as http, Mover(rig, modes=()) as onlooker:
        reading = asyncio.create_task(stream(http, rig, prompt_text(3), **LONG))
        place, sequence = await onlooker.place()
        to = "worker-0" if place != "worker-0" else "worker-1"
        said = await asyncio.to_thread(rig.cli, "migrate", own_id, "--to", to)
        assert f"{place} → {to}  moved in epoch 1" in said
        expect_identical([(3, await reading)], expected)
        for request in (own_id, sequence.rpartition(".")[0]):
            assert f"source={place} target={to}" in await shown(rig, "trace", request, "migration")
    await expect_empty(rig)


async def test_who_runs_nowhere_is_said_to(rig: UpRig) -> None:
    assert "nosuch runs nowhere" in await asyncio.to_thread(rig.cli, "migrate", "nosuch")


async def test_dozens_of_migrations_under_load_change_no_token_and_leave_no_block(rig: UpRig) -> None:
    expected = await expected_outcomes(rig, **LENGTH)
    async with Mover(rig, modes=tuple(MigrationMode)) as mover:
        dozens = until(lambda: mover.moved >= 30, 240.0)
        results = await offer_during(rig, dozens, rate=12, prompts=8, **LENGTH)
    expect_identical(results, expected)
    assert not [body for body in mover.finished if body.outcome is MigrationOutcome.LOST]
    await expect_empty(rig)


async def test_a_worker_that_is_asked_to_end_moves_its_work_and_nothing_is_computed_anew(rig: UpRig) -> None:
    expected = await expected_outcomes(rig, **LONG)
    before = await rig.metric("millrace_ingress_continuations_total")
    async with Mover(rig, modes=()) as onlooker:
        load = asyncio.create_task(offer(rig, rate=50, count=9, prompts=8, **LONG))
        await onlooker.seen(9)
    os.kill(rig.pids("worker-0.json")[0], signal.SIGTERM)
    expect_identical(await load, expected)
    assert await rig.metric("millrace_ingress_continuations_total") == before
    await rig.well(INSTANCES)


async def test_a_drained_instance_moves_its_work_stays_away_and_comes_back_when_asked(rig: UpRig) -> None:
    expected = await expected_outcomes(rig, **LONG)
    async with Mover(rig, modes=()) as onlooker:
        load = asyncio.create_task(offer(rig, rate=50, count=9, prompts=8, **LONG))
        await onlooker.seen(9)
        said = await asyncio.to_thread(rig.cli, "drain", "worker-2", "--within", "8")
        assert "worker-2 is gone" in said, said
        assert re.search(r"worker-2: [3-9] moved, .*none left", said), said
        assert not rig.pids("worker-2.json")
        expect_identical(await load, expected)
    moved = [body for body in onlooker.heard if body.outcome is MigrationOutcome.MOVED]
    assert len(moved) >= 3
    assert {(body.source, body.reason) for body in moved} == {("worker-2", MoveReason.DRAIN)}
    back = await asyncio.to_thread(rig.cli, "drain", "worker-2", "--back")
    assert "worker-2 is ready" in back, back
    await rig.well(INSTANCES)
