"""Failures while a sequence moves: a clear no, or a recompute with the same tokens; and no block is lost.

What every engine promises, modelled ones too, is in tests/contract/engine.
"""

import asyncio
from collections.abc import Iterator

import msgspec
import pytest
from millrace.actor.engine import (
    KvBlocksRead,
    KvDenied,
    KvLeaseTaken,
    KvRoomReserved,
    SequenceStopped,
    UnreserveInEngine,
)
from millrace.contracts.kv import UNSUMMED, CopierKind, KvRank, KvRefusal
from millrace.contracts.worker import Sampling

from tests.engine.bench_engine import BenchEngine
from tests.engine.moving import Journey, Pair, begin, prompt_of, recomputed, settled, tell, until_tokens

#: So many that a sequence still decodes when the next line of a test runs, however slow the machine.
LONG = Sampling(max_tokens=600, seed=17, ignore_eos=True)
#: Tokens that are compared after a move; the soak compares sequences to their ends.
AFTER = 48


def _denied(said: object, reason: KvRefusal) -> None:
    assert isinstance(said, KvDenied), said
    assert said.reason is reason, said


@pytest.fixture(autouse=True)
def _every_block_is_free_afterwards(pair: Pair) -> Iterator[None]:
    yield
    for engine in (pair.source, pair.target):
        for migration in {getattr(event, "migration", "") for event in engine.events} - {""}:
            tell(engine, UnreserveInEngine(migration=migration))
        engine.cancel(*(name for name, decoded in engine.decoded.items() if decoded.finish is None))
    settled(pair)


def _pulled(pair: Pair, salt: int) -> Journey:
    journey = begin(pair, prompt_of(150, salt=salt), LONG, at=20)
    assert isinstance(journey.lease(), KvLeaseTaken)
    assert isinstance(journey.reserve(), KvRoomReserved)
    assert isinstance(journey.pull(), KvBlocksRead)
    return journey


def _alone(journey: Journey, tokens: int) -> list[int]:
    """The first tokens of the sequence if it never moves."""
    return journey.pair.source.run(journey.prompt, msgspec.structs.replace(journey.sampling, max_tokens=tokens)).tokens


def _stays_as_alone(journey: Journey) -> None:
    """It decodes on at the source. Ends it AFTER tokens later."""
    here = journey.pair.source.decoded[journey.name].tokens
    decoded = _ended_early(journey.pair.source, journey.name, len(here) + AFTER)
    assert decoded == _alone(journey, len(decoded))


def _ended_early(engine: BenchEngine, name: str, tokens: int) -> list[int]:
    until_tokens(engine, name, tokens)
    engine.cancel(name)
    return list(engine.decoded[name].tokens)


def test_a_frozen_sequence_leaves_the_engine_idle(pair: Pair) -> None:
    journey = begin(pair, prompt_of(40, salt=42), LONG, at=10)
    journey.lease()
    held = len(journey.freeze().blocks)
    pair.source.until(lambda: (last := pair.source.snapshot()).blocks_total - last.blocks_free == held)
    steps = pair.source.snapshot().step
    pair.source.loop.run_until_complete(asyncio.sleep(0.1))
    assert pair.source.snapshot().step <= steps + 1
    journey.end(moved=False)
    _stays_as_alone(journey)


def test_a_frozen_sequence_keeps_its_place_in_a_full_batch(pair: Pair) -> None:
    names = [pair.source.add(prompt_of(8, salt=120 + index), LONG) for index in range(15)]
    journey = begin(pair, prompt_of(8, salt=119), LONG, at=3)
    journey.lease()
    journey.freeze()
    names.append(pair.source.add(prompt_of(8, salt=140), LONG))
    pair.source.until(lambda: bool((last := pair.source.snapshot()) and last.waiting))
    journey.end(moved=False)
    pair.source.cancel(*names)
    _stays_as_alone(journey)


def test_a_frozen_sequence_is_not_preempted(pair: Pair) -> None:
    journey = begin(pair, prompt_of(200, salt=6), LONG, at=5)
    journey.lease()
    stopped = journey.freeze()
    crowd = [pair.source.add(prompt_of(300, salt=160 + index), LONG) for index in range(7)]
    pair.source.until(
        lambda: any(pair.source.decoded[name].preemptions for name in crowd if name in pair.source.decoded)
    )
    again = journey.freeze()
    assert again.blocks == stopped.blocks
    journey.end(moved=False)
    pair.source.cancel(*crowd)
    _stays_as_alone(journey)


def test_a_matched_prefix_is_given_back_where_there_is_no_room(pair: Pair) -> None:
    turned = pair.turned()
    prompt = prompt_of(150, salt=9)
    turned.target.run(prompt, Sampling(max_tokens=3))
    journey = begin(turned, prompt, LONG, at=20)
    journey.lease()
    _denied(journey.reserve(blocks=65), KvRefusal.NO_BLOCKS)


def test_engines_of_other_models_take_nothing(pair: Pair) -> None:
    journey = begin(pair, prompt_of(40, salt=10), LONG, at=5)
    journey.lease()
    kv = pair.source.info.kv
    changed = [
        msgspec.structs.replace(kv, fingerprint="another"),
        msgspec.structs.replace(kv, copiers=[CopierKind.MODELLED]),
        msgspec.structs.replace(kv, machine="elsewhere"),
        msgspec.structs.replace(kv, ranks=[msgspec.structs.replace(rank, socket="/nowhere") for rank in kv.ranks]),
        msgspec.structs.replace(kv, ranks=[KvRank(planes=[], region_bytes=4096)]),
    ]
    for endpoint in changed:
        pair.source.info = msgspec.structs.replace(pair.source.info, kv=endpoint)
        _denied(journey.reserve(), KvRefusal.INCOMPATIBLE)
    pair.source.info = msgspec.structs.replace(pair.source.info, kv=kv)


def test_numbers_that_no_migrator_sends_are_denied(pair: Pair) -> None:
    journey = begin(pair, prompt_of(150, salt=11), LONG, at=5)
    journey.lease()
    _denied(journey.reserve(blocks=-1), KvRefusal.INVALID)
    journey.reserve(blocks=2)
    _denied(journey.pull(from_block=-1), KvRefusal.INVALID)
    _denied(journey.pull(blocks=[[1 << 63]], checksums=[]), KvRefusal.COPY_FAILED)


def test_of_a_sample_only_what_was_summed_is_compared(pair: Pair) -> None:
    journey = begin(pair, prompt_of(150, salt=18), LONG, at=20)
    journey.lease()
    journey.reserve()
    (sums,) = journey.leased.checksums
    _denied(journey.pull(checksums=[[UNSUMMED, 7, *sums[2:]]]), KvRefusal.COPY_FAILED)
    _denied(journey.pull(checksums=[[7]]), KvRefusal.COPY_FAILED)
    assert isinstance(journey.pull(checksums=[[UNSUMMED, UNSUMMED, *sums[2:]]]), KvBlocksRead)


@pytest.mark.parametrize(
    ("salt", "change"),
    enumerate([{"blocks": []}, {"blocks": [[1 << 30]] * 4}, {"from_block": 9, "blocks": []}, {"computed_tokens": -5}]),
)
def test_a_tail_that_cannot_be_read_is_computed(pair: Pair, salt: int, change: dict[str, object]) -> None:
    journey = _pulled(pair, 22 + salt)
    journey.freeze()
    since = len(pair.target.events)
    journey.commit(**change)
    journey.end(moved=True)
    before, after = journey.stopped.output_token_ids, _ended_early(pair.target, journey.name, AFTER)
    assert before + after == _alone(journey, len(before) + len(after))
    missing = journey.stopped.computed_tokens > journey.have * journey.endpoint().block_tokens
    computed = recomputed(pair.target, since)
    assert computed is None or bool(computed) == (missing or ("computed_tokens" in change))


def test_a_reservation_is_for_its_sequence_only(pair: Pair) -> None:
    journey = _pulled(pair, 31)
    journey.freeze()
    journey.prompt = [*journey.prompt[:-1], 249 if journey.prompt[-1] != 249 else 248]
    since = len(pair.target.events)
    journey.commit()
    journey.end(moved=True)
    _ended_early(pair.target, journey.name, 1)
    assert recomputed(pair.target, since) in (None, journey.stopped.computed_tokens + 1), "nothing of it was taken"


def test_a_freeze_under_another_migrations_freeze_waits_its_turn(pair: Pair) -> None:
    journey = begin(pair, prompt_of(40, salt=30), LONG, at=10)
    journey.lease()
    other = msgspec.structs.replace(journey, migration=pair.migration())
    assert isinstance(other.lease(), KvLeaseTaken)
    assert isinstance(journey.freeze(), SequenceStopped)
    _denied(other.freeze(), KvRefusal.NOT_RUNNING)
    journey.end(moved=False)
    assert isinstance(other.freeze(), SequenceStopped)
    other.end(moved=False)
    _stays_as_alone(journey)
