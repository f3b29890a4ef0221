"""Failures while a sequence moves: a clear no, or a recompute with the same tokens; and no block is lost.

What every engine promises, modelled ones too, is in tests/contract/engine.
"""

from collections.abc import Callable, Sequence

import msgspec
import pytest
from millrace.actor.engine import (
    FreezeInEngine,
    KvBlocksRead,
    KvDenied,
    KvLeaseTaken,
    KvRoomReserved,
    LeaseInEngine,
    PullIntoEngine,
    SequenceAdded,
    SequenceStopped,
    UnreserveInEngine,
)
from millrace.contracts.kv import UNSUMMED, CopierKind, KvRank, KvRefusal
from millrace.contracts.worker import Sampling

from tests.engine.bench_engine import BenchEngine
from tests.engine.moving import (
    NEVER_NS,
    Journey,
    Pair,
    answer,
    ask,
    begin,
    prompt_of,
    recomputed,
    settled,
    tell,
    until_tokens,
)
from tests.testbed.move_commands import pull_of

#: So many that a sequence still decodes when the next line of a test runs, however slow the machine.
LONG = Sampling(max_tokens=600, seed=17, ignore_eos=True)
#: Tokens that are compared after a move; test_vllm_migration.py and the soak compare sequences to their ends.
AFTER = 48


def _free(engine: BenchEngine) -> int:
    last = engine.snapshot()
    return last.blocks_free


def _denied(said: object, reason: KvRefusal) -> None:
    assert isinstance(said, KvDenied), said
    assert said.reason is reason, said


def _pulled(pair: Pair, salt: int, *, length: int = 150) -> Journey:
    """Leased, reserved and pulled."""
    journey = begin(pair, prompt_of(length, salt=salt), LONG, at=20)
    assert isinstance(journey.lease(), KvLeaseTaken)
    assert isinstance(journey.reserve(), KvRoomReserved)
    assert isinstance(journey.pull(), KvBlocksRead)
    return journey


def _alone(journey: Journey, tokens: int) -> list[int]:
    """The first tokens of the sequence if it never moves."""
    return journey.pair.source.run(journey.prompt, msgspec.structs.replace(journey.sampling, max_tokens=tokens)).tokens


def _goes_on_as_alone(journey: Journey) -> None:
    """It decodes at the target what it would have decoded at the source. Ends it AFTER tokens later."""
    before = journey.stopped.output_token_ids
    after = _ended_early(journey.pair.target, journey.name, AFTER)
    assert journey.pair.source.decoded[journey.name].tokens == before, "every output came before the stop"
    assert before + after == _alone(journey, len(before) + len(after))


def _stays_as_alone(journey: Journey, *, beside: Sequence[str] = ()) -> None:
    """It decodes on at the source, beside these. Ends it AFTER tokens later, and them."""
    here = journey.pair.source.decoded[journey.name].tokens
    decoded = _ended_early(journey.pair.source, journey.name, len(here) + AFTER)
    journey.pair.source.cancel(*beside)
    assert decoded == _alone(journey, len(decoded))


def _ended_early(engine: BenchEngine, name: str, tokens: int) -> list[int]:
    until_tokens(engine, name, tokens)
    engine.cancel(name)
    return list(engine.decoded[name].tokens)


# --- who may be leased


def test_a_sequence_that_waits_is_not_leased(pair: Pair) -> None:
    crowd = [pair.source.add(prompt_of(10, salt=100 + index), LONG) for index in range(17)]
    pair.source.until(lambda: bool((last := pair.source.snapshot()) and last.waiting))
    _denied(ask(pair.source, LeaseInEngine(migration="x2", sequence=crowd[-1], from_block=0)), KvRefusal.NOT_RUNNING)
    pair.source.cancel(*crowd)
    settled(pair)


def test_a_frozen_sequence_keeps_its_place_in_a_full_batch(pair: Pair) -> None:
    names = [pair.source.add(prompt_of(8, salt=120 + index), LONG) for index in range(15)]
    journey = begin(pair, prompt_of(8, salt=119), LONG, at=3)
    journey.lease()
    journey.freeze()
    names.append(pair.source.add(prompt_of(8, salt=140), LONG))
    pair.source.until(lambda: bool((last := pair.source.snapshot()) and last.waiting))
    journey.end(moved=False)
    _stays_as_alone(journey, beside=names)
    settled(pair)


# --- leases that are lost


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
    _stays_as_alone(journey, beside=crowd)
    settled(pair)


# --- reservations


def test_blocks_are_accounted_for_in_every_state(pair: Pair) -> None:
    settled(pair)
    total = _free(pair.target)
    journey = begin(pair, prompt_of(150, salt=7), LONG, at=20)
    journey.lease()
    assert isinstance(journey.reserve(blocks=9), KvRoomReserved)
    pair.target.until(lambda: _free(pair.target) == total - 9)
    journey.pull()
    assert _free(pair.target) == total - 9
    journey.unreserve()
    pair.target.until(lambda: _free(pair.target) == total)
    pair.source.cancel(journey.name)
    settled(pair)


def test_a_matched_prefix_is_given_back_where_there_is_no_room(pair: Pair) -> None:
    turned = pair.turned()
    prompt = prompt_of(150, salt=9)
    turned.target.run(prompt, Sampling(max_tokens=3))
    journey = begin(turned, prompt, LONG, at=20)
    journey.lease()
    _denied(journey.reserve(blocks=65), KvRefusal.NO_BLOCKS)
    turned.source.cancel(journey.name)
    settled(pair)


def test_engines_of_other_models_take_nothing(pair: Pair) -> None:
    journey = begin(pair, prompt_of(40, salt=10), LONG, at=5)
    journey.lease()
    assert pair.source.info.kv is not None
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
    pair.source.cancel(journey.name)
    settled(pair)


# --- pulls


def test_a_pull_without_reservation_or_outside_it_is_denied(pair: Pair) -> None:
    command = PullIntoEngine(migration="x3", from_block=0, blocks=[[1]], checksums=[], until_ns=NEVER_NS)
    _denied(ask(pair.target, command), KvRefusal.INVALID)
    journey = begin(pair, prompt_of(150, salt=11), LONG, at=5)
    journey.lease()
    _denied(journey.reserve(blocks=-1), KvRefusal.INVALID)
    journey.reserve(blocks=2)
    _denied(journey.pull(), KvRefusal.INVALID)
    _denied(
        ask(pair.target, msgspec.structs.replace(command, migration=journey.migration, from_block=-1)),
        KvRefusal.INVALID,
    )
    huge = msgspec.structs.replace(command, migration=journey.migration, blocks=[[1 << 63]])
    _denied(ask(pair.target, huge), KvRefusal.COPY_FAILED)
    journey.unreserve()
    pair.source.cancel(journey.name)
    settled(pair)


def test_of_a_sample_only_what_was_summed_is_compared(pair: Pair) -> None:
    journey = begin(pair, prompt_of(150, salt=18), LONG, at=20)
    journey.lease()
    journey.reserve()

    def told(*sums: int) -> Callable[[PullIntoEngine], PullIntoEngine]:
        """The first blocks' sums replaced by these."""
        return lambda c: msgspec.structs.replace(c, checksums=[[*sums, *c.checksums[0][len(sums) :]]])

    _denied(journey.pull(damage=told(UNSUMMED, 7)), KvRefusal.COPY_FAILED)
    _denied(journey.pull(damage=lambda c: msgspec.structs.replace(c, checksums=[[7]])), KvRefusal.COPY_FAILED)
    assert isinstance(journey.pull(damage=told(UNSUMMED, UNSUMMED)), KvBlocksRead)
    journey.unreserve()
    pair.source.cancel(journey.name)
    settled(pair)


def test_what_was_read_wrong_is_computed_again(pair: Pair) -> None:
    """A pull that failed, and nobody cared: the sequence is taken over all the same."""
    journey = begin(pair, prompt_of(150, salt=13), LONG, at=20)
    journey.lease()
    journey.reserve()
    flipped = lambda c: msgspec.structs.replace(c, checksums=[[*c.checksums[0][:2], 7, *c.checksums[0][3:]]])  # noqa: E731
    _denied(journey.pull(damage=flipped), KvRefusal.COPY_FAILED)
    journey.have = len(journey.leased.blocks)
    journey.freeze()
    since = len(pair.target.events)
    journey.commit()
    journey.end(moved=True)
    _goes_on_as_alone(journey)
    assert recomputed(pair.target, since) != 0
    settled(pair)


def test_blocks_of_a_lease_that_was_lost_do_not_pass_for_good(pair: Pair) -> None:
    """They belong to somebody else by the time they are read."""
    journey = begin(pair, prompt_of(150, salt=14), LONG, at=20)
    journey.lease()
    journey.reserve()
    pair.source.cancel(journey.name)
    others = [pair.source.add(prompt_of(150, salt=170 + index), LONG) for index in range(12)]
    pair.source.until(lambda: bool((last := pair.source.snapshot()) and last.waiting and not last.blocks_free))
    _denied(journey.pull(), KvRefusal.COPY_FAILED)
    journey.unreserve()
    pair.source.cancel(*others)
    settled(pair)


def test_a_reservation_that_ends_stops_what_is_read_into_it(pair: Pair) -> None:
    journey = begin(pair, prompt_of(400, salt=15), LONG, at=20)
    journey.lease()
    journey.reserve()
    assert journey.leased is not None
    # An idle target reads everything at once: these begin last, so that they cannot have ended on a slow machine.
    busy = [pair.target.add(prompt_of(8, salt=180 + index), LONG) for index in range(4)]
    pair.target.until(lambda: all(name in pair.target.decoded for name in busy))
    since = len(pair.target.events)
    tell(pair.target, pull_of(journey.leased), UnreserveInEngine(migration=journey.migration))
    _denied(answer(pair.target, journey.migration, since), KvRefusal.CANCELLED)
    pair.source.cancel(journey.name)
    pair.target.cancel(*busy)
    settled(pair)


def test_a_pull_goes_on_while_the_target_decodes_and_after_it_has_stopped(pair: Pair) -> None:
    short = Sampling(max_tokens=6, ignore_eos=True)
    busy = [pair.target.add(prompt_of(8, salt=190 + index), short) for index in range(4)]
    journey = begin(pair, prompt_of(400, salt=16), LONG, at=20)
    journey.lease()
    journey.reserve()
    assert isinstance(journey.pull(), KvBlocksRead)
    pair.target.finish(*busy)
    journey.freeze()
    journey.commit()
    journey.end(moved=True)
    _goes_on_as_alone(journey)
    settled(pair)


# --- arrivals


@pytest.mark.parametrize(
    ("change", "salt"),
    [
        ({"blocks": []}, 22),
        ({"blocks": [[1 << 30]] * 4}, 23),
        ({"from_block": 9, "blocks": []}, 25),
        ({"computed_tokens": -5}, 26),
    ],
)
def test_a_tail_that_cannot_be_read_is_computed(pair: Pair, change: dict[str, object], salt: int) -> None:
    journey = _pulled(pair, salt)
    journey.freeze()
    since = len(pair.target.events)
    journey.commit(**change)
    journey.end(moved=True)
    _goes_on_as_alone(journey)
    missing = journey.stopped.computed_tokens > journey.have * journey.block_tokens
    computed = recomputed(pair.target, since)
    assert computed is None or bool(computed) == (missing or ("computed_tokens" in change))
    journey.unreserve()
    settled(pair)


def test_a_reservation_is_for_its_sequence_only(pair: Pair) -> None:
    journey = _pulled(pair, 31)
    journey.freeze()
    journey.prompt = [*journey.prompt[:-1], 249 if journey.prompt[-1] != 249 else 248]
    since = len(pair.target.events)
    journey.commit()
    journey.end(moved=True)
    assert journey.stopped is not None
    _ended_early(pair.target, journey.name, 1)
    assert recomputed(pair.target, since) in (None, journey.stopped.computed_tokens + 1), "nothing of it was taken"
    settled(pair)


def test_a_sequence_is_told_as_added_when_its_kv_is_there(pair: Pair) -> None:
    journey = _pulled(pair, 28)
    journey.freeze()
    since = len(pair.target.events)
    journey.commit()
    added = lambda: [e for e in pair.target.events[since:] if isinstance(e, SequenceAdded)]  # noqa: E731
    pair.target.until(lambda: bool(added()))
    journey.end(moved=True)
    _goes_on_as_alone(journey)
    assert [event.sequence for event in added()] == [journey.name]
    told = [type(e).__name__ for e in pair.target.events[since:] if not isinstance(e, KvDenied)]
    assert told.index("SequenceAdded") <= told.index("EngineStepped")
    settled(pair)


def test_a_freeze_under_another_migrations_freeze_waits_its_turn(pair: Pair) -> None:
    journey = begin(pair, prompt_of(40, salt=30), LONG, at=10)
    journey.lease()
    other = msgspec.structs.replace(journey, migration=pair.migration())
    assert isinstance(other.lease(), KvLeaseTaken)
    assert isinstance(journey.freeze(), SequenceStopped)
    _denied(
        ask(pair.source, FreezeInEngine(migration=other.migration, sequence=other.name, from_block=0)),
        KvRefusal.NOT_RUNNING,
    )
    journey.end(moved=False)
    assert isinstance(other.freeze(), SequenceStopped)
    other.end(moved=False)
    _stays_as_alone(journey)
    settled(pair)
