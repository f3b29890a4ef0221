"""KV replicas in modelled engines: blocks that give way. tests/sim/test_kv_replicas.py has what is made of them."""

from typing import Any

from millrace.actor.engine import EngineSequence, KvBlocksRead, KvDenied, ReserveInEngine
from millrace.contracts.kv import KvRefusal

from tests.testbed.move_commands import pull_of
from tests.unit.moving_rig import Side, World
from tests.unit.test_enginemodel_moving import parameters, prompt, told

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


def replicated(blocks_total: int) -> tuple[World, Side, Side, Any]:
    """``b`` has so many blocks, and holds a replica of ``r``."""
    world = World()
    small = parameters(blocks_total=blocks_total, max_model_len=blocks_total * BLOCK)
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


def test_a_sequence_that_grows_takes_the_replicas_before_anybody_is_preempted():
    world, _, b, _ = replicated(16)
    b.add("x", prompt(100, seed=9), max_tokens=100)
    world.until(lambda: b.finished("x"))
    assert not b.model.scheduler.replicas
    assert not b.model.scheduler.preemptions


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
