"""KV replicas in real engines: a continuation begins on the replica, and the replica gives way to everything else."""

import time

import msgspec
import pytest
from millrace.actor.engine import (
    KvBlocksRead,
    KvDenied,
    KvLeaseTaken,
    KvRoomReserved,
    PullIntoEngine,
    ReserveInEngine,
    SequenceAdded,
    UnreserveInEngine,
)
from millrace.contracts.kv import KvHandover, KvRefusal
from millrace.contracts.worker import Sampling

from tests.engine.moving import Journey, Pair, ask, begin, prompt_of, recomputed, settled, tell
from tests.testbed.move_commands import NEVER_NS, pull_of

BLOCK = 32
GREEDY = Sampling(max_tokens=200, temperature=0.0, ignore_eos=True)


def replicate(journey: Journey) -> list[list[int]]:
    """Copies the source's full blocks into a replica at the target; returns their ids at the source."""
    lease = msgspec.structs.replace(journey, migration=f"{journey.migration}.1")
    leased = lease.lease()
    reserve = ReserveInEngine(
        migration=journey.migration,
        sequence=journey.name,
        endpoint=journey.endpoint(),
        token_ids=journey.prompt[: len(leased.blocks) * BLOCK],
        blocks=len(leased.blocks) - 1,  # it grows
        replica=True,
    )
    assert isinstance(ask(journey.pair.target, reserve), KvRoomReserved)
    pull = pull_of(leased, migration=journey.migration, lease=lease.migration)
    assert isinstance(ask(journey.pair.target, pull), KvBlocksRead)
    assert isinstance(lease.lease(), KvLeaseTaken), "the lease held until all was read"
    lease.end(moved=False)
    return leased.blocks


def resume(journey: Journey, output: list[int], blocks: int) -> SequenceAdded:
    """The sequence continues at the target, with so many blocks of its replica."""
    target, since = journey.pair.target, len(journey.pair.target.events)
    target.decoded.pop(journey.name, None)
    replica = {"migration": journey.migration, "endpoint": journey.endpoint(), "from_block": blocks}
    handover = KvHandover(blocks=[], computed_tokens=blocks * BLOCK, read_ms=0, **replica)
    target.bring(journey.given(output, handover))
    found: list[SequenceAdded] = []

    def added() -> bool:
        found[:] = [e for e in target.events[since:] if isinstance(e, SequenceAdded) and e.sequence == journey.name]
        return bool(found)

    target.until(added)
    return found[0]


@pytest.mark.parametrize(("told", "salt"), [(90, 61), (40, 62)], ids=["all", "without the last tokens"])
def test_a_continuation_begins_on_the_replica_and_says_the_same(pair: Pair, told: int, salt: int) -> None:
    prompt = prompt_of(200, salt=salt)
    expected = pair.source.run(prompt, GREEDY)
    journey = begin(pair, prompt, GREEDY, at=90)
    copied = replicate(journey)
    pair.source.cancel(journey.name)
    blocks = min(len(copied), (len(prompt) + told - 1) // BLOCK)
    since = len(pair.target.events)
    assert resume(journey, expected.tokens[:told], blocks).kv_tokens == blocks * BLOCK
    assert pair.target.finish(journey.name)[0].tokens == expected.tokens[told:]
    assert recomputed(pair.target, since) in (None, len(prompt) + told - blocks * BLOCK)
    settled(pair)


def test_a_replica_gives_way_before_anybody_is_preempted(pair: Pair) -> None:
    journey = begin(pair, prompt_of(500, salt=63), GREEDY, at=20)
    began_ns = time.time_ns()
    copied = replicate(journey)
    pair.target.until(lambda: (seen := pair.target.snapshot()) is not None and seen.at_ns > began_ns)
    assert pair.target.idle(), "its blocks count as free"
    # Five sequences of 11 blocks fit into 64, and not beside a replica of 16.
    short = Sampling(max_tokens=20, ignore_eos=True)
    crowd = [pair.target.add(prompt_of(330, salt=90 + index), short) for index in range(5)]
    pair.target.finish(*crowd)
    assert not sum(pair.target.decoded[name].preemptions for name in crowd)
    gone = PullIntoEngine(
        migration=journey.migration, from_block=0, blocks=copied, checksums=[], until_ns=NEVER_NS, lease="any"
    )
    late = ask(pair.target, gone)
    assert isinstance(late, KvDenied)
    assert late.reason is KvRefusal.INVALID, "it is not there any more"
    pair.source.cancel(journey.name)
    settled(pair)


def test_a_replica_gives_way_to_a_reservation_and_not_to_another_replica(pair: Pair) -> None:
    journey = begin(pair, prompt_of(500, salt=64), GREEDY, at=20)
    replicate(journey)
    wanted = {"sequence": "x.0", "endpoint": journey.endpoint(), "token_ids": prompt_of(64, salt=65), "blocks": 60}
    denied = ask(pair.target, ReserveInEngine(migration="another", replica=True, **wanted))
    assert isinstance(denied, KvDenied)
    assert denied.reason is KvRefusal.NO_BLOCKS
    assert isinstance(ask(pair.target, ReserveInEngine(migration="real", **wanted)), KvRoomReserved)
    tell(pair.target, UnreserveInEngine(migration="real"))
    known = list(pair.source.decoded[journey.name].tokens)
    pair.source.cancel(journey.name)
    assert resume(journey, known, 10).kv_tokens == 0, "computed, as without a replica"
    pair.target.finish(journey.name)
    settled(pair)
