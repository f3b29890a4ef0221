"""KV replicas in modelled engines: blocks that grow, count as free, and give way."""

from typing import Any

import pytest
from millrace.actor.engine import EngineSequence, KvBlocksRead, KvDenied, ReserveInEngine
from millrace.contracts.kv import KvRefusal

from tests.testbed.move_commands import pull_of
from tests.unit.moving_rig import Side, World
from tests.unit.test_enginemodel_moving import free, parameters, prompt, told

BLOCK = 16


def replica_of(a: Side, given: EngineSequence, name: str, blocks: list[int]) -> ReserveInEngine:
    return ReserveInEngine(
        migration=name,
        sequence=given.sequence,
        endpoint=a.kv,
        token_ids=given.prompt_token_ids[: len(blocks) * BLOCK],
        blocks=len(blocks),
        replica=True,
    )


def replicated(blocks_total: int, **changes: Any) -> tuple[World, Side, Side, Any]:
    """``b`` has so many blocks, and holds a replica of ``r``."""
    world = World()
    small = parameters(blocks_total=blocks_total, max_model_len=blocks_total * BLOCK, **changes)
    a, b = Side(world, "a"), Side(world, "b", parameters=small)
    given = a.add("r", prompt(100))
    told(a, "r", 20)
    leased = a.lease("r", "m.1")
    b.ask(replica_of(a, given, "m", leased.blocks))
    assert isinstance(b.ask(pull_of(leased, migration="m", lease="m.1")), KvBlocksRead)
    a.end("m.1", moved=False)
    assert len(leased.blocks) >= 7
    assert b.model.snapshot(world.simulation.now_ns).blocks_free == blocks_total, "they count as free"
    return world, a, b, leased


@pytest.mark.parametrize(("blocks", "max_tokens", "caching"), [(12, 20, True), (12, 20, False), (16, 100, True)])
def test_a_prompt_and_one_that_grows_take_the_replicas_before_anybody_is_preempted(
    blocks: int, max_tokens: int, caching: bool
):
    world, _, b, _ = replicated(blocks, prefix_caching=caching)
    b.add("x", prompt(100, seed=9), max_tokens=max_tokens)
    world.until(lambda: b.finished("x"))
    assert not b.model.scheduler.replicas
    assert not b.model.scheduler.preemptions
    assert free(b) == blocks


def test_a_reservation_takes_the_replicas_and_another_replica_does_not():
    _, a, b, leased = replicated(12)
    other = a.add("s", prompt(90, seed=3))
    told(a, "s", 5)
    denied = b.ask(replica_of(a, other, "n", list(range(8))))
    assert denied.reason is KvRefusal.NO_BLOCKS
    assert b.model.scheduler.replicas
    reserved = b.reserve(a, "s", "o", prompt(90, seed=3), 8)
    assert not isinstance(reserved, KvDenied)
    assert not b.model.scheduler.replicas
    late = b.ask(pull_of(leased, migration="m", lease="m.1", checksums=[]))
    assert late.reason is KvRefusal.INVALID


@pytest.mark.parametrize(("blocks_total", "room"), [(12, True), (7, False)])
def test_a_replica_grows_with_what_is_pulled_as_far_as_blocks_are_free(blocks_total: int, room: bool):
    world, a, b, leased = replicated(blocks_total)
    count = len(leased.blocks)
    world.until(lambda: len(a.said("r")) >= 50 or a.finished("r"))
    more = a.lease("r", "m.2", from_block=count)
    assert more.blocks
    read = b.ask(pull_of(more, migration="m", lease="m.2"))
    if room:
        assert isinstance(read, KvBlocksRead)
        assert len(b.model.scheduler.replicas["m"]) == count + len(more.blocks)
    else:
        assert isinstance(read, KvDenied)
        assert read.reason is KvRefusal.NO_BLOCKS
        assert len(b.model.scheduler.replicas["m"]) == count
