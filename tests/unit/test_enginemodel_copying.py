"""Cost of a migration to the engines whose processor does the copying."""

from __future__ import annotations

from itertools import pairwise

import pytest
from millrace.actor.engine import EngineStepped, KvBlocksRead, SequenceStopped
from millrace.enginemodel.copying import IDLE_BYTES, NO_COST, CopyCost, CopyJob, CopyWork

from tests.unit.moving_rig import Side, World
from tests.unit.test_enginemodel_moving import KINDS, prompt, told

#: A block of the rig is two of what is copied in a step; a step of one sequence takes 1.01 ms.
BLOCK_BYTES = 16 * 131_072
COST = CopyCost(copy_bytes_per_s=1e9, checksum_bytes_per_s=2e9, bytes_per_step=BLOCK_BYTES // 2)


def pair(cost: CopyCost, kind: str = "plain") -> tuple[World, Side, Side]:
    world = World(copy_cost=cost, bytes_per_s=1e12)
    return world, Side(world, "a", **KINDS[kind]), Side(world, "b", **KINDS[kind])


def ends(side: Side) -> list[int]:
    return [event.at_ns for event in side.events if isinstance(event, EngineStepped)]


def intervals_ms(side: Side, since: int) -> list[float]:
    return [(later - earlier) / 1e6 for earlier, later in pairwise(ends(side)[since:])]


def test_a_share_is_divided_among_jobs_and_larger_where_nobody_waits() -> None:
    work, done = CopyWork(), []
    work.cost = CopyCost(copy_bytes_per_s=1e9, bytes_per_step=100)
    work.owe(CopyJob(30, 1.0, lambda: done.append("small")))
    work.owe(CopyJob(200, 2.0, lambda: done.append("large")))
    spent_ns, ended = work.share(idle=False)
    assert (spent_ns, len(ended), len(work)) == (30 + 100, 1, 1)
    assert work.share(idle=False) == (200, [])
    assert work.share(idle=True)[0] == 100
    assert work.share(idle=True) == (0, [])
    work.owe(CopyJob(IDLE_BYTES + 5, 0.0, lambda: None))
    assert work.share(idle=True) == (0, [])
    assert len(work) == 1


def test_a_dropped_job_costs_nothing() -> None:
    work, job = CopyWork(), CopyJob(10, 1.0, lambda: None)
    work.owe(job)
    work.drop(job)
    work.drop(job)
    assert work.share(idle=False) == (0, [])


def test_the_target_pays_for_what_it_reads_a_share_before_each_step() -> None:
    world, a, b = pair(COST)
    a.model.moves.leases.verify = False
    given = a.add("s", prompt(70), max_tokens=400)
    b.add("other", prompt(20, 1), max_tokens=400)
    told(a, "s", 5)
    leased = a.lease("s", "m")
    assert len(leased.blocks) == 4
    b.reserve(a, "s", "m", given.prompt_token_ids + a.said("s"), blocks=10)
    steps = len(ends(b))
    read = b.ask(b.pull_of(leased))
    assert isinstance(read, KvBlocksRead)
    slowed = [interval for interval in intervals_ms(b, steps) if interval > 1.5]
    assert slowed == [pytest.approx(1.01 + BLOCK_BYTES / 2 / 1e6, abs=0.01)] * (8 - 1)
    assert read.duration_ns > 8 * BLOCK_BYTES / 2
    world.run(20)
    assert max(intervals_ms(b, len(ends(b)) - 5)) == pytest.approx(1.01, abs=0.01)


def test_the_source_pays_for_checksums_before_it_answers() -> None:
    world, a, _ = pair(COST)
    a.add("s", prompt(70), max_tokens=400)
    a.add("other", prompt(20, 1), max_tokens=400)
    told(a, "s", 5)
    steps, since_ns = len(ends(a)), world.simulation.now_ns
    leased = a.lease("s", "m")
    assert world.simulation.now_ns - since_ns > len(leased.blocks) * BLOCK_BYTES / 2
    assert len(a.said("s")) > 5 + 7
    assert max(intervals_ms(a, steps - 1)) == pytest.approx(1.02 + BLOCK_BYTES / 4 / 1e6, abs=0.01)
    steps = len(ends(a))
    stopped = a.freeze("s", "m")
    assert isinstance(stopped, SequenceStopped)
    assert stopped.output_token_ids == a.said("s")
    world.run(20)
    assert max(intervals_ms(a, steps)) == pytest.approx(1.01 + len(stopped.blocks) * BLOCK_BYTES / 2 / 1e6, abs=0.1)


def test_a_verified_read_is_copied_and_then_summed() -> None:
    world, a, b = pair(COST)
    given = a.add("s", prompt(70), max_tokens=400)
    b.add("other", prompt(20, 1), max_tokens=600)
    told(a, "s", 5)
    leased = a.lease("s", "m")
    count = 2 * len(leased.blocks)
    b.reserve(a, "s", "m", given.prompt_token_ids + a.said("s"), blocks=10)
    steps = len(ends(b))
    assert isinstance(b.ask(b.pull_of(leased)), KvBlocksRead)
    world.run(5)
    intervals = [interval for interval in intervals_ms(b, steps) if interval > 1.2]
    copies = [pytest.approx(1.01 + BLOCK_BYTES / 2 / 1e6, abs=0.01)] * count
    sums = [pytest.approx(1.01 + BLOCK_BYTES / 4 / 1e6, abs=0.01)] * count
    assert intervals[-count:] == sums
    assert intervals[:-count] == copies[: len(intervals) - count]
    assert len(intervals) >= 2 * count - 1


@pytest.mark.parametrize("cost", [NO_COST, CopyCost(bytes_per_step=1)])
def test_what_a_network_card_copies_costs_no_step_anything(cost: CopyCost) -> None:
    _world, a, b = pair(cost)
    given = a.add("s", prompt(70))
    b.add("other", prompt(20, 1), max_tokens=400)
    told(a, "s", 5)
    leased = a.lease("s", "m")
    b.reserve(a, "s", "m", given.prompt_token_ids + a.said("s"), blocks=10)
    b.ask(b.pull_of(leased))
    assert max(intervals_ms(b, 2)) < 1.1
