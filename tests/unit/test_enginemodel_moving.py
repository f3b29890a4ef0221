"""Moving sequences between modelled engines: every block accounted for, every token the right one."""

import random
from typing import Any

import pytest
from millrace.actor.engine import (
    EngineSequence,
    KvBlocksRead,
    KvDenied,
    KvLeaseTaken,
    UnreserveInEngine,
)
from millrace.contracts.kv import KvRefusal
from millrace.enginemodel.engine import ModelledEngine
from millrace.enginemodel.network import KvRead
from millrace.enginemodel.parameters import EngineParameters
from millrace.sim.kv_network import KvFaults

from tests.unit.moving_rig import PARAMETERS, STEP_TIME, Side, World


def parameters(**changes: Any) -> EngineParameters:
    fields = {name: getattr(PARAMETERS, name) for name in PARAMETERS.__struct_fields__}
    return EngineParameters(**{**fields, **changes})


#: Ways in which an engine runs: step by step, two steps under way, contiguous runs, without a prefix index,
#: many steps at once.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "async": {"parameters": parameters(async_scheduling=True)},
    "uncached": {"parameters": parameters(prefix_caching=False)},
    "runs": {"parameters": parameters(prefix_caching=False), "tell_interval_ns": 20_000_000, "run_ns_max": 50_000_000},
    "cached runs": {"tell_interval_ns": 20_000_000, "run_ns_max": 50_000_000},
}
kinds = pytest.mark.parametrize("kind", list(KINDS))


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(97, 123) for _ in range(length)]


def told(side: Side, name: str, tokens: int) -> None:
    side.world.until(lambda: len(side.said(name)) >= tokens)


def alone(given: EngineSequence) -> list[int]:
    """Return the tokens of a sequence that never moves."""
    side = Side(World(), "alone")
    side.add(given.sequence, given.prompt_token_ids, max_tokens=given.sampling.max_tokens)
    side.world.until(lambda: side.finished(given.sequence))
    return side.said(given.sequence)


def pair(kind: str = "plain", **network: Any) -> tuple[World, Side, Side]:
    world = World(**network)
    return world, Side(world, "a", **KINDS[kind]), Side(world, "b", **KINDS[kind])


def free(side: Side) -> int:
    return side.model.moves.accounting().free


def test_a_frozen_sequence_keeps_its_place_in_the_batch() -> None:
    world, a, _ = pair()
    for index in range(6):
        a.add(f"s{index}", prompt(16, index))
    a.add("waits", prompt(16, 9))
    told(a, "s5", 2)
    a.lease("s0", "m")
    a.freeze("s0", "m")
    world.run(20)
    assert not a.said("waits")
    shown = [entry.sequence for entry in a.model.snapshot(world.simulation.now_ns).running]
    assert sorted(shown) == [f"s{index}" for index in range(6)]
    a.end("m", moved=True)
    world.run(5)
    assert a.said("waits")


def test_an_engine_without_an_endpoint_denies_everything() -> None:
    _world, a, b = pair()
    b.engine.paced.engine.moves.endpoint = None
    assert b.reserve(a, "s", "m", prompt(40), blocks=4).reason is KvRefusal.UNABLE
    assert b.lease("s", "m").reason is KvRefusal.UNABLE
    b.end("m", moved=True)
    assert ModelledEngine(PARAMETERS, STEP_TIME).moves.endpoint is None


@pytest.mark.parametrize(
    ("reads", "times"),
    [
        ([("a", "b", 10), ("c", "d", 10)], [1, 1]),
        ([("a", "b", 10), ("b", "a", 10)], [1, 1]),  # there and back are two ways
        ([("a", "b", 10), ("a", "c", 10)], [2, 2]),
        ([("a", "c", 10), ("b", "c", 10)], [2, 2]),
        ([("a", "b", 10), ("a", "c", 30)], [2, 4]),  # alone, the second gets faster
    ],
)
def test_reads_share_a_link_and_not_those_of_others(reads: list[tuple[str, str, int]], times: list[int]) -> None:
    world = World(bytes_per_s=1e9, latency_ns=0)
    sides = {name: Side(world, name) for name in "abcd"}
    ends: list[float] = []
    for source, target, blocks in [("a", "b", 10), *reads]:
        begin = world.simulation.now_ns
        port = world.network.attach(sides[target].actor.process, sides[target].model)
        read = KvRead(migration="n", endpoint=sides[source].kv, blocks=list(range(blocks)), into=list(range(blocks)))
        port.begin(read, lambda _: ends.append((world.simulation.now_ns - begin) / 1e6))  # noqa: B023
        if len(ends) == 0:
            world.until(lambda: len(ends) == 1)  # how long one takes alone
    world.until(lambda: len(ends) == 3)
    assert ends[1:] == [pytest.approx(factor * ends[0], abs=0.01) for factor in times]


def prepared(a: Side, b: Side) -> tuple[EngineSequence, KvLeaseTaken]:
    """A sequence that decodes at ``a``, under lease, with room at ``b``."""
    given = a.add("s", prompt(70))
    told(a, "s", 5)
    leased = a.lease("s", "m")
    b.reserve(a, "s", "m", given.prompt_token_ids + a.said("s"), blocks=10)
    return given, leased


def ended_there(a: Side, b: Side, given: EngineSequence, leased: KvLeaseTaken, *, read_ms: int = 2_000) -> list[int]:
    """Tokens that a sequence says at both, that moves without the blocks that were leased and ends at ``b``."""
    stopped = a.freeze("s", "m", len(leased.blocks))
    b.bring(given, stopped, a, read_ms=read_ms)
    b.world.until(lambda: b.has("s"))
    a.end("m", moved=True)
    b.world.until(lambda: b.finished("s"))
    return [*stopped.output_token_ids, *b.said("s")]


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ({"torn": 1.0}, KvRefusal.COPY_FAILED),
        ({"failed": 1.0}, KvRefusal.COPY_FAILED),
        ({"stall": 1.0}, KvRefusal.LEASE_LOST),
        ({"late": 1.0, "late_ns": (30_000_000, 40_000_000)}, KvRefusal.LEASE_LOST),
    ],
)
def test_a_read_that_goes_wrong_is_denied_and_its_blocks_are_computed(faults: Any, reason: KvRefusal) -> None:
    world, a, b = pair()
    world.network.faults = KvFaults(**faults)
    given, leased = prepared(a, b)
    assert b.ask(b.pull_of(leased, within_ms=15)).reason is reason
    assert ended_there(a, b, given, leased, read_ms=15) == alone(given)
    assert not b.model.moves.arrivals.poisoned
    assert (free(a), free(b)) == (64, 64)


def test_a_torn_read_that_nobody_compares_gives_other_tokens_and_is_told_to_checkers() -> None:
    world, a, b = pair()
    world.network.faults = KvFaults(torn=1.0)
    a.model.moves.leases.verify = False
    given, leased = prepared(a, b)
    assert isinstance(b.ask(b.pull_of(leased)), KvBlocksRead)
    assert ended_there(a, b, given, leased) != alone(given)
    assert b.model.moves.arrivals.poisoned == ["s"]


@pytest.mark.parametrize("verify", [True, False])
def test_blocks_that_were_given_away_under_a_read_are_noticed(verify: bool) -> None:
    world, a, b = pair(bytes_per_s=1e8)
    a.model.moves.leases.verify = verify
    _given, leased = prepared(a, b)
    since = len(b.events)
    b.do(b.pull_of(leased))
    a.engine.paced.cancel(["s"])
    for index in range(4):
        a.add(f"t{index}", prompt(300, 50 + index), max_tokens=20)
    answer = b.answer("m", since)
    if verify:
        assert answer.reason is KvRefusal.COPY_FAILED
        assert not world.network.violations
    else:
        assert isinstance(answer, KvBlocksRead)
        assert len(world.network.violations) == 1
        assert world.network.accepted_reads[-1].stale == [block for (block,) in leased.blocks]


def test_reads_of_a_source_that_is_gone_fail() -> None:
    world, a, b = pair(bytes_per_s=1e8)
    _given, leased = prepared(a, b)
    since = len(b.events)
    b.do(b.pull_of(leased))
    world.simulation.faults.kill(a.actor)
    assert b.answer("m", since).reason is KvRefusal.COPY_FAILED
    assert b.ask(b.pull_of(leased)).reason is KvRefusal.COPY_FAILED
    b.do(UnreserveInEngine(migration="m"))
    assert free(b) == 64


def test_a_sequence_cancelled_while_its_last_blocks_are_read_leaves_nothing() -> None:
    world, a, b = pair(bytes_per_s=1e8)
    given, _leased = prepared(a, b)
    stopped = a.freeze("s", "m")
    b.bring(given, stopped, a)
    world.run(1)
    snapshot = b.model.snapshot(world.simulation.now_ns)
    assert [entry.sequence for entry in snapshot.running] == ["s"]
    assert snapshot.blocks_free == 54
    b.engine.paced.cancel(["s"])
    assert free(b) == 64
    world.run(500)
    assert not b.has("s")
    b.check()


@kinds
@pytest.mark.parametrize("seed", range(6))
def test_many_moves_with_faults_lose_no_block_and_no_token(kind: str, seed: int) -> None:
    rng = random.Random(f"{kind}/{seed}")
    world = World(seed, bytes_per_s=2e9)
    sides = [Side(world, name, **KINDS[kind]) for name in "abc"]
    world.network.faults = KvFaults(stall=0.05, torn=0.1, failed=0.1, late=0.1, late_ns=(1_000_000, 80_000_000))
    given: dict[str, EngineSequence] = {}
    place: dict[str, Side] = {}
    said: dict[str, list[int]] = {}
    for index in range(9):
        side = rng.choice(sides)
        name = f"s{index}"
        given[name] = side.add(name, prompt(rng.randrange(5, 120), index), max_tokens=rng.randrange(20, 120))
        place[name], said[name] = side, []
    for number in range(40):
        world.run(rng.random() * 4)
        name = rng.choice(list(given))
        _move_somehow(world, rng, given[name], place, said, f"m{number}", sides)
    world.until(lambda: all(place[name].finished(name) for name in given))
    for name, sequence in given.items():
        assert said[name] + place[name].said(name) == alone(sequence)
    assert [free(side) for side in sides] == [64] * 3
    assert not world.network.violations
    assert not any(side.model.moves.arrivals.poisoned for side in sides)


def _move_somehow(
    world: World,
    rng: random.Random,
    given: EngineSequence,
    place: dict[str, Side],
    said: dict[str, list[int]],
    migration: str,
    sides: list[Side],
) -> None:
    """Tries to move a sequence, as far as it goes, with whatever a careless migrator might do."""
    name = given.sequence
    a = place[name]
    b = rng.choice([side for side in sides if side is not a])
    if b.said(name):
        return  # the rig tells sequences apart by their names only
    if isinstance(a.lease(name, migration), KvDenied):
        return
    tokens = given.prompt_token_ids + said[name] + a.said(name)
    room = b.reserve(a, name, migration, tokens, blocks=-(-len(tokens) // 16) + rng.randrange(3))
    if isinstance(room, KvDenied):
        a.end(migration, moved=False)
        return
    position = room.matched_blocks
    for _ in range(rng.randrange(3)):
        leased = a.lease(name, migration, position)
        if isinstance(leased, KvLeaseTaken) and leased.blocks:
            read = b.ask(b.pull_of(leased, within_ms=60))
            position += len(leased.blocks) if isinstance(read, KvBlocksRead) or rng.random() < 0.3 else 0
    stopped = a.freeze(name, migration, position)
    if isinstance(stopped, KvDenied) or rng.random() < 0.2:
        a.end(migration, moved=False)
        b.do(UnreserveInEngine(migration=migration))
        return
    if rng.random() < 0.1:
        b.do(UnreserveInEngine(migration=migration))
    b.bring(given, stopped, a, read_ms=60)
    world.until(lambda: b.has(name))
    a.end(migration, moved=True)
    said[name] = stopped.output_token_ids
    place[name] = b
