"""Contract of every Engine about moving sequences: leases, freezes, reservations, pulls and arrivals."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import pytest
from millrace.actor.engine import (
    EndLeaseInEngine,
    EngineSequence,
    EngineStepped,
    FreezeInEngine,
    KvBlocksRead,
    KvDenied,
    KvLeaseTaken,
    KvRoomReserved,
    LeaseInEngine,
    ReserveInEngine,
    SequenceStopped,
    UnreserveInEngine,
)
from millrace.contracts.kv import KvRefusal

from tests.contract.engine.harness import (
    BLOCK_SIZE,
    BLOCKS_TOTAL,
    MAX_MODEL_LEN,
    MAX_SEQUENCES,
    VOCABULARY,
    Harness,
    Pair,
    without_sampling_noise,
)
from tests.testbed.move_commands import brought, handover_of, pull_of

SERIAL = itertools.count()
MIGRATIONS = (f"m{number}" for number in itertools.count())
SECOND = 1_000_000_000
READ_MS = 5_000
#: Tokens of a sequence that shall still decode a few questions later.
LONG = 120


def prompt(length: int) -> list[int]:
    """Token ids that no other test has used."""
    rng = random.Random(f"moving {next(SERIAL)}")
    return [rng.randrange(min(200, VOCABULARY)) for _ in range(length)]


@pytest.fixture(autouse=True)
def _every_block_is_free_afterwards(pair: Pair) -> Iterator[None]:
    yield
    for engine in pair.both():
        for migration in {getattr(event, "migration", "") for event in engine.events} - {""}:
            engine.move(EndLeaseInEngine(migration=migration, moved=False))
            engine.move(UnreserveInEngine(migration=migration))
        engine.cancel([name for name, result in engine.results.items() if not result.over])
        engine.run(prompt(3), max_tokens=1)  # whatever was freed since is in the next snapshot
        assert engine.until_idle().blocks_free == BLOCKS_TOTAL


def decoding(engine: Harness, length: int = 70, *, tokens: int = 3, **sampling: Any) -> str:
    """A sequence that has some tokens and will have many more."""
    name = engine.add(prompt(length), **{"max_tokens": LONG, "ignore_eos": True, **sampling})
    engine.until(lambda: len(engine.results[name].token_ids) >= tokens, f"{tokens} tokens of {name}")
    return name


def unmoved(engine: Harness, source: EngineSequence) -> list[int]:
    """Return the tokens that the sequence gives where it stays."""
    twin = engine.add(source.prompt_token_ids, **msgspec.structs.asdict(source.sampling))
    return engine.finish(twin).token_ids


def lease(engine: Harness, name: str, migration: str, from_block: int = 0) -> Any:
    return engine.ask(LeaseInEngine(migration=migration, sequence=name, from_block=from_block))


def freeze(engine: Harness, name: str, migration: str, from_block: int = 0) -> Any:
    return engine.ask(FreezeInEngine(migration=migration, sequence=name, from_block=from_block))


def reserve(source: Harness, target: Harness, name: str, migration: str, *, blocks: int = 7, **changes: Any) -> Any:
    given = source.given[name]
    tokens = given.prompt_token_ids + given.output_token_ids + source.results[name].token_ids
    command = ReserveInEngine(
        migration=migration, sequence=name, endpoint=source.info.kv, token_ids=tokens, blocks=blocks
    )
    return target.ask(msgspec.structs.replace(command, **changes))


def pull(target: Harness, leased: KvLeaseTaken, *, within_ns: int = READ_MS * 1_000_000, **changes: Any) -> Any:
    return target.ask(pull_of(leased, **{"until_ns": target.now_ns() + within_ns, **changes}))


def handover(source: Harness, stopped: SequenceStopped, **changes: Any) -> EngineSequence:
    """The sequence as it comes to the target."""
    told = handover_of(stopped, source.info.kv, **{"read_ms": READ_MS, **changes})
    return brought(source.given[stopped.sequence], stopped, told)


def denied(answer: Any, reason: KvRefusal) -> None:
    assert isinstance(answer, KvDenied), answer
    assert answer.reason is reason


def spoilt(checksums: list[list[int]]) -> list[list[int]]:
    """Those of other bytes in the last block."""
    return [[*rank[:-1], rank[-1] ^ 1] for rank in checksums]


def steps_until(engine: Harness, since: int, found: Callable[[Any], bool] = lambda _: False) -> int:
    """Steps told since then, before the first event of that kind."""
    before = itertools.takewhile(lambda event: not found(event), engine.events[since:])
    return sum(isinstance(event, EngineStepped) for event in before)


def gives(name: str, event: Any) -> bool:
    """Whether this is a step that gave a sequence tokens."""
    return isinstance(event, EngineStepped) and any(output.sequence == name for output in event.outputs)


class Move:
    """A whole migration, step by step."""

    def __init__(self, source: Harness, target: Harness, name: str) -> None:
        self.source, self.target, self.name = source, target, name
        self.migration = next(MIGRATIONS)
        self.next_block = 0

    def prepare(self, blocks: int = 8) -> Move:
        self.leased = lease(self.source, self.name, self.migration)
        assert isinstance(self.leased, KvLeaseTaken)
        room = reserve(self.source, self.target, self.name, self.migration, blocks=blocks)
        self.matched = self.next_block = room.matched_blocks
        return self

    def round(self) -> Move:
        leased = lease(self.source, self.name, self.migration, self.next_block)
        if leased.blocks:
            assert isinstance(pull(self.target, leased), KvBlocksRead)
            self.next_block += len(leased.blocks)
        return self

    def stop(self) -> Move:
        self.stopped = freeze(self.source, self.name, self.migration, self.next_block)
        assert isinstance(self.stopped, SequenceStopped)
        return self

    def commit(self, **changes: Any) -> Move:
        self.target.bring(handover(self.source, self.stopped, **changes))
        self.target.until(lambda: self.target.results[self.name].added, f"{self.name} to arrive")
        self.source.move(EndLeaseInEngine(migration=self.migration, moved=True))
        return self

    def tokens(self) -> list[int]:
        """Everything that it said, at both engines."""
        brought: list[int] = self.stopped.output_token_ids
        return brought + self.target.finish(self.name).token_ids


def test_a_lease_tells_full_blocks_and_a_renewal_those_filled_since(pair: Pair) -> None:
    engine = pair.source
    name = decoding(engine, 2 * BLOCK_SIZE + 3)
    first = lease(engine, name, "lease-1")
    assert (first.sequence, first.from_block, first.prompt_tokens) == (name, 0, 2 * BLOCK_SIZE + 3)
    assert first.computed_tokens == first.prompt_tokens + first.output_tokens - 1
    assert len(first.blocks) == first.computed_tokens // BLOCK_SIZE >= 2
    assert all(len(rank) == len(first.blocks) for rank in first.checksums)
    engine.until(lambda: len(engine.results[name].token_ids) >= 2 * BLOCK_SIZE, "two more blocks")
    later = lease(engine, name, "lease-1", from_block=len(first.blocks))
    whole = lease(engine, name, "lease-1")
    assert len(later.blocks) >= 1
    assert whole.blocks[: len(first.blocks) + len(later.blocks)] == first.blocks + later.blocks
    assert len({block for (block,) in whole.blocks}) == len(whole.blocks)


def test_a_prompt_under_way_is_not_leased_yet(pair: Pair) -> None:
    engine = pair.source
    name, denied = _asked_at_once(engine, "lease-3")
    assert denied.reason in (KvRefusal.NOT_RUNNING, KvRefusal.UNKNOWN_SEQUENCE)
    engine.until(lambda: bool(engine.results[name].token_ids), "a token")
    assert isinstance(lease(engine, name, "lease-3"), KvLeaseTaken)


def _asked_at_once(engine: Harness, migration: str) -> tuple[str, Any]:
    """Adds a sequence and asks for its lease; again where an engine of its own process has computed its prompt."""
    for _ in range(20):
        name = engine.add(prompt(150), max_tokens=MAX_MODEL_LEN - 150, ignore_eos=True)
        answer = lease(engine, name, migration)
        if isinstance(answer, KvDenied) or not engine.results[name].token_ids:
            break
        engine.cancel([name])
        engine.until_idle()
    return name, answer


def test_a_lease_is_lost_when_its_sequence_ends(pair: Pair) -> None:
    engine = pair.source
    name = decoding(engine, max_tokens=40)
    assert isinstance(lease(engine, name, "lease-4"), KvLeaseTaken)
    engine.finish(name)
    denied(lease(engine, name, "lease-4"), KvRefusal.LEASE_LOST)
    assert freeze(engine, name, "lease-4").reason is KvRefusal.LEASE_LOST


def test_a_lease_is_lost_when_its_sequence_is_preempted(pair: Pair) -> None:
    engine = pair.source
    others = [decoding(engine, 90, tokens=1) for _ in range(4)]
    name = decoding(engine, 90, tokens=1)  # the newest: the first to go
    assert isinstance(lease(engine, name, "lease-5"), KvLeaseTaken)
    engine.until(
        lambda: (
            any(o.preemptions for o in engine.results[name].outputs)
            or all(engine.results[each].over for each in others)
        ),
        "memory",
    )
    denied(lease(engine, name, "lease-5"), KvRefusal.LEASE_LOST)


def test_a_frozen_sequence_stands_still_with_every_token_told(pair: Pair) -> None:
    engine = pair.source
    name, other = decoding(engine), decoding(engine)
    lease(engine, name, "freeze-1")
    since = len(engine.events)
    stopped = freeze(engine, name, "freeze-1")
    told = engine.results[name].token_ids
    assert stopped.output_token_ids == told
    assert stopped.computed_tokens == 70 + len(told) - 1
    assert len(stopped.blocks) == -(-stopped.computed_tokens // BLOCK_SIZE)
    assert abs(stopped.frozen_ns - engine.now_ns()) < 60 * SECOND
    before = len(engine.results[other].token_ids)
    engine.until(lambda: len(engine.results[other].token_ids) >= before + 10, "the other one to go on")
    assert engine.results[name].token_ids == told
    position = engine.events.index(stopped)
    assert all(
        name not in [output.sequence for output in event.outputs]
        for event in engine.events[max(since, position) :]
        if isinstance(event, EngineStepped)
    )


def test_a_sequence_that_was_frozen_and_thawed_says_what_it_would_have_said(pair: Pair) -> None:
    engine = pair.source
    name = decoding(engine)
    for number in range(3):
        migration = f"freeze-3-{number}"
        lease(engine, name, migration)
        stopped = freeze(engine, name, migration)
        engine.rest()
        engine.move(EndLeaseInEngine(migration=migration, moved=False))
    tokens = engine.finish(name).token_ids
    assert tokens[: len(stopped.output_token_ids)] == stopped.output_token_ids
    assert tokens == unmoved(engine, engine.given[name])


def test_what_is_not_there_is_not_leased_and_what_was_not_leased_is_not_frozen(pair: Pair) -> None:
    engine = pair.source
    denied(lease(engine, "nobody.0", "lease-2"), KvRefusal.UNKNOWN_SEQUENCE)
    name = decoding(engine)
    denied(freeze(engine, name, "freeze-4"), KvRefusal.LEASE_LOST)
    engine.finish(name)


def test_a_moved_sequence_leaves_without_a_word(pair: Pair) -> None:
    engine = pair.source
    name = decoding(engine)
    lease(engine, name, "freeze-5")
    stopped = freeze(engine, name, "freeze-5")
    engine.move(EndLeaseInEngine(migration="freeze-5", moved=True))
    engine.rest()
    result = engine.results.pop(name)
    assert result.token_ids == stopped.output_token_ids
    assert not result.over


def test_a_frozen_sequence_can_be_cancelled(pair: Pair) -> None:
    engine = pair.source
    name = decoding(engine)
    lease(engine, name, "freeze-6")
    freeze(engine, name, "freeze-6")
    engine.cancel([name])
    engine.until_idle()
    assert lease(engine, name, "freeze-6").reason is KvRefusal.LEASE_LOST


def test_a_reservation_takes_idle_blocks_and_gives_them_back(pair: Pair) -> None:
    name = decoding(pair.source)
    room = reserve(pair.source, pair.target, name, "reserve-1", blocks=BLOCKS_TOTAL)
    assert room.matched_blocks == 0
    assert room.copier in pair.source.info.kv.copiers
    denied(reserve(pair.source, pair.target, name, "reserve-2", blocks=4), KvRefusal.NO_BLOCKS)
    denied(reserve(pair.source, pair.target, name, "reserve-1", blocks=1), KvRefusal.INVALID)
    pair.target.move(UnreserveInEngine(migration="reserve-1"))
    assert isinstance(reserve(pair.source, pair.target, name, "reserve-3", blocks=BLOCKS_TOTAL), KvRoomReserved)


def test_a_reservation_preempts_nobody_and_others_live_beside_it(pair: Pair) -> None:
    other = decoding(pair.target, 60, max_tokens=60)
    name = decoding(pair.source)
    held = -(-120 // BLOCK_SIZE)
    room = reserve(pair.source, pair.target, name, "reserve-4", blocks=BLOCKS_TOTAL - held)
    assert isinstance(room, KvRoomReserved)
    result = pair.target.finish(other)
    assert max(output.preemptions for output in result.outputs) == 0
    assert result.token_ids == unmoved(pair.target, pair.target.given[other])


def test_other_kv_is_incompatible(pair: Pair) -> None:
    name = decoding(pair.source)
    other = msgspec.structs.replace(pair.source.info.kv, fingerprint="of another model")
    denied(reserve(pair.source, pair.target, name, "reserve-5", endpoint=other), KvRefusal.INCOMPATIBLE)


def test_blocks_of_the_prefix_need_not_travel(pair: Pair) -> None:
    name = decoding(pair.source, 3 * BLOCK_SIZE + 5)
    pair.target.run(pair.source.given[name].prompt_token_ids, max_tokens=2)
    move = Move(pair.source, pair.target, name).prepare()
    assert move.matched == 3
    assert move.round().stop().commit().tokens() == unmoved(pair.source, pair.source.given[name])


def test_pulled_blocks_are_found_when_their_sequence_has_come_and_not_before(pair: Pair) -> None:
    name = decoding(pair.source, 3 * BLOCK_SIZE + 5)
    move = Move(pair.source, pair.target, name).prepare().round()
    tokens = pair.source.given[name].prompt_token_ids
    again = pair.target.run(tokens, max_tokens=2, ignore_eos=True)
    assert again.outputs[0].cached_tokens == 0
    pair.source.until(lambda: len(pair.source.results[name].token_ids) >= 40, "a block more")
    known = tokens + move.stop().commit().tokens()
    computed = move.stopped.computed_tokens
    again = pair.target.run(known[: computed + 1], max_tokens=2, ignore_eos=True)
    assert again.outputs[0].cached_tokens == computed // BLOCK_SIZE * BLOCK_SIZE


def test_a_pull_says_what_it_moved(pair: Pair) -> None:
    name = decoding(pair.source, 3 * BLOCK_SIZE + 5)
    leased = lease(pair.source, name, "pull-1")
    reserve(pair.source, pair.target, name, "pull-1")
    read = pull(pair.target, leased)
    assert (read.from_block, read.blocks) == (0, len(leased.blocks))
    assert read.bytes == len(leased.blocks) * pair.source.info.kv.block_bytes
    assert read.descriptors >= 1
    assert read.duration_ns >= 0


def test_a_pull_without_or_beyond_its_reservation_is_denied(pair: Pair) -> None:
    name = decoding(pair.source, 3 * BLOCK_SIZE)
    leased = lease(pair.source, name, "pull-3")
    denied(pull(pair.target, leased), KvRefusal.INVALID)
    reserve(pair.source, pair.target, name, "pull-3", blocks=4)
    denied(pull(pair.target, leased, from_block=3), KvRefusal.INVALID)


def test_a_read_that_ends_late_or_finds_other_bytes_than_were_leased_is_void(pair: Pair) -> None:
    name = decoding(pair.source, 3 * BLOCK_SIZE)
    leased = lease(pair.source, name, "pull-4")
    reserve(pair.source, pair.target, name, "pull-4")
    denied(pull(pair.target, leased, within_ns=-1_000_000), KvRefusal.LEASE_LOST)
    if pair.compares:
        denied(pull(pair.target, leased, checksums=spoilt(leased.checksums)), KvRefusal.COPY_FAILED)
    assert isinstance(pull(pair.target, leased), KvBlocksRead)


def test_unreserving_ends_a_pull(pair: Pair) -> None:
    name = decoding(pair.source, 3 * BLOCK_SIZE)
    leased = lease(pair.source, name, "pull-6")
    reserve(pair.source, pair.target, name, "pull-6")
    pair.target.move(pull_of(leased))
    pair.target.move(UnreserveInEngine(migration="pull-6"))
    assert isinstance(reserve(pair.source, pair.target, name, "pull-7", blocks=BLOCKS_TOTAL), KvRoomReserved)


@pytest.mark.parametrize("rounds", [0, 1])
def test_a_moved_sequence_says_what_it_would_have_said(pair: Pair, rounds: int) -> None:
    name = decoding(pair.source)
    move = Move(pair.source, pair.target, name).prepare()
    for _ in range(rounds):
        move.round()
    assert move.stop().commit().tokens() == unmoved(pair.source, pair.source.given[name])
    first = pair.target.results[name].outputs[0]
    assert first.cached_tokens == 70
    assert first.preemptions == 0


def test_several_rounds_follow_a_source_that_decodes_on(pair: Pair) -> None:
    name = decoding(pair.source)
    move = Move(pair.source, pair.target, name).prepare()
    for tokens in (20, 45, 70):
        pair.source.until(lambda wanted=tokens: len(pair.source.results[name].token_ids) >= wanted, "more")
        move.round()
    assert len(move.stop().stopped.blocks) <= 2, "the rounds have brought the rest"
    assert move.commit().tokens() == unmoved(pair.source, pair.source.given[name])


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.9, "seed": 7},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"min_tokens": 60, "ignore_eos": False},
        {"stop_token_ids": [3], "min_tokens": 70},
    ],
    ids=["a seed", "penalties", "min_tokens", "stop tokens"],
)
def test_the_state_of_sampling_moves_along(pair: Pair, sampling: dict[str, Any]) -> None:
    name = decoding(pair.source, **sampling)
    move = Move(pair.source, pair.target, name).prepare().round().stop().commit()
    assert move.tokens() == unmoved(pair.source, pair.source.given[name])


def test_log_probabilities_go_on_as_if_it_had_never_moved(pair: Pair) -> None:
    name = decoding(pair.source, logprobs=2, max_tokens=40)
    move = Move(pair.source, pair.target, name).prepare().round().stop().commit()
    pair.target.finish(name)
    twin = pair.source.add(pair.source.given[name].prompt_token_ids, logprobs=2, max_tokens=40, ignore_eos=True)
    unmoved_entries = without_sampling_noise(pair.source.finish(twin).logprobs)
    here = without_sampling_noise(pair.source.results[name].logprobs)
    there = without_sampling_noise(pair.target.results[name].logprobs)
    assert len(here) == len(move.stopped.output_token_ids)
    assert here + there == unmoved_entries


def test_a_moved_sequence_that_is_preempted_says_what_it_would_have_said(pair: Pair) -> None:
    for _ in range(5):
        others = [decoding(pair.target, 90, tokens=1) for _ in range(4)]
        name = decoding(pair.source)
        move = Move(pair.source, pair.target, name).prepare(4).round().stop().commit()
        assert move.tokens() == unmoved(pair.source, pair.source.given[name])
        for other in others:
            assert pair.target.finish(other).token_ids == unmoved(pair.source, pair.target.given[other])
        if pair.target.results[name].outputs[-1].preemptions > 0:
            return
    pair.too_late("the others were done each time before memory was short")


def test_a_sequence_moves_there_and_back_again(pair: Pair) -> None:
    name = decoding(pair.source)
    there = Move(pair.source, pair.target, name).prepare().round().stop().commit()
    twin = pair.source.given[name]
    pair.target.until(lambda: len(pair.target.results[name].token_ids) >= 20, "some tokens there")
    pair.source.results.pop(name)
    back = Move(pair.target, pair.source, name).prepare().round().stop().commit()
    assert back.stopped.output_token_ids[: len(there.stopped.output_token_ids)] == there.stopped.output_token_ids
    assert back.tokens() == unmoved(pair.source, twin)
    pair.target.results.pop(name)


def test_who_comes_while_long_prompts_are_computed_decodes_beside_them(pair: Pair) -> None:
    """A prompt could take each step's whole budget, and all after it wait: who came with its KV has its token first."""
    under_way = [came_beside_prompts(pair, steps_before=steps) for steps in range(4)]
    if not any(under_way):
        pair.too_late("the prompts were computed each time before it came")


def came_beside_prompts(pair: Pair, *, steps_before: int) -> bool:
    """Moves a sequence while a row of prompts, four steps each, is computed. Returns whether some were left by then."""
    name = decoding(pair.source, 40)
    move = Move(pair.source, pair.target, name).prepare().round().stop()
    target, since = pair.target, len(pair.target.events)
    crowd = [target.add(prompt(MAX_MODEL_LEN - 6), max_tokens=1) for _ in range(MAX_SEQUENCES - 1)]
    target.until(lambda: steps_until(target, since) >= steps_before, "chunks of the first prompt")
    assert move.commit().tokens() == unmoved(pair.source, pair.source.given[name])
    for other in crowd:
        target.finish(other)
    added = steps_until(target, since, lambda event: getattr(event, "sequence", "") == name)
    decoded, answered = (steps_until(target, since, partial(gives, each)) for each in (name, crowd[-1]))
    assert decoded <= added + 2, "one step may have been under way, and told before the word that it was added"
    return answered > added + 4


def test_last_blocks_with_other_bytes_are_computed_again(pair: Pair) -> None:
    if not pair.compares:
        pytest.skip("live modelled engines cannot look into each other")
    name = decoding(pair.source)
    move = Move(pair.source, pair.target, name).prepare().round().stop()
    move.commit(checksums=spoilt(move.stopped.checksums))
    assert move.tokens() == unmoved(pair.source, pair.source.given[name])


@pytest.mark.parametrize("ended", [{"read_ms": 0}, {"until_ns": 1}])
def test_last_blocks_that_come_too_late_are_computed_again(pair: Pair, ended: dict[str, int]) -> None:
    name = decoding(pair.source)
    move = Move(pair.source, pair.target, name).prepare().round().stop().commit(**ended)
    assert move.tokens() == unmoved(pair.source, pair.source.given[name])
    assert pair.target.results[name].outputs[0].cached_tokens < 70


@pytest.mark.parametrize("reserved", [True, False])
def test_a_round_that_was_never_pulled_or_has_lost_its_room_is_computed_again(pair: Pair, reserved: bool) -> None:
    name = decoding(pair.source)
    move = Move(pair.source, pair.target, name).prepare()
    if reserved:
        move.next_block = 2
        move.stop()
    else:
        move.round().stop()
        pair.target.move(UnreserveInEngine(migration=move.migration))
    assert move.commit().tokens() == unmoved(pair.source, pair.source.given[name])


def test_a_sequence_that_arrives_can_be_cancelled_at_once(pair: Pair) -> None:
    name = decoding(pair.source)
    move = Move(pair.source, pair.target, name).prepare().round().stop()
    pair.target.bring(handover(pair.source, move.stopped))
    pair.target.cancel([name])
    pair.target.rest()
    assert not pair.target.results.pop(name).token_ids
    pair.source.move(EndLeaseInEngine(migration=move.migration, moved=False))
    assert pair.source.finish(name).token_ids == unmoved(pair.source, pair.source.given[name])


def test_a_refused_sequence_gives_its_reservation_back(pair: Pair) -> None:
    name = decoding(pair.source)
    move = Move(pair.source, pair.target, name).prepare().round().stop()
    wrong = msgspec.structs.replace(handover(pair.source, move.stopped), prompt_token_ids=[10**6])
    pair.target.bring(wrong)
    pair.target.until(lambda: pair.target.results[name].rejected is not None, "a refusal")
    pair.target.results.pop(name)
    assert isinstance(reserve(pair.source, pair.target, name, "refused-1", blocks=BLOCKS_TOTAL), KvRoomReserved)
