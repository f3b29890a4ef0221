"""A running sequence moves to another engine with its KV, and goes on as if it never had."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from millrace.actor.engine import (
    EndLeaseInEngine,
    EngineEvent,
    EngineStepped,
    KvBlocksRead,
    KvLeaseTaken,
    KvRoomReserved,
    SequenceAdded,
    SequenceStopped,
)
from millrace.contracts.worker import Sampling, StructuredOutput

from tests.engine.bench_engine import BenchEngine
from tests.engine.moving import Pair, begin, prompt_of, recomputed, same, settled, tell, until_tokens, whole

SCHEMA = (
    '{"type":"object","properties":{"name":{"type":"string","maxLength":12},"tags":{"type":"array",'
    '"items":{"enum":["x","yy"]},"minItems":1,"maxItems":3}},"required":["name","tags"],"additionalProperties":false}'
)
GREEDY = Sampling(max_tokens=220, temperature=0.0, ignore_eos=True)
#: Name, prompt's length, sampling, output tokens at which it moves.
CASES: list[tuple[str, int, Sampling, int]] = [
    ("one_token", 8, GREEDY, 1),
    ("short", 8, GREEDY, 30),
    ("a_block_less_one", 31, GREEDY, 3),
    ("a_block", 32, GREEDY, 20),
    ("long", 500, GREEDY, 60),
    ("late", 100, GREEDY, 110),
    ("seed", 150, Sampling(max_tokens=130, seed=12, temperature=0.8, top_p=0.9, top_k=40, ignore_eos=True), 40),
    (
        "penalties",
        150,
        Sampling(
            max_tokens=130,
            temperature=0.0,
            frequency_penalty=1.3,
            presence_penalty=0.5,
            repetition_penalty=1.2,
            ignore_eos=True,
        ),
        50,
    ),
    ("logprobs", 70, Sampling(max_tokens=120, temperature=0.0, logprobs=3, ignore_eos=True), 30),
    (
        "min_tokens_and_stop",
        40,
        Sampling(max_tokens=130, min_tokens=90, seed=8, logit_bias={99: 7.0}, stop_token_ids=[99]),
        30,
    ),
    ("json_schema", 60, Sampling(max_tokens=80, seed=6, structured=StructuredOutput(json_schema=SCHEMA)), 9),
]


def _case(name: str) -> tuple[list[int], Sampling, int]:
    _, length, sampling, at = next(case for case in CASES if case[0] == name)
    return prompt_of(length, salt=len(name)), sampling, at


@pytest.mark.parametrize("name", [case[0] for case in CASES])
def test_a_sequence_that_moves_goes_on_the_same(pair: Pair, name: str) -> None:
    prompt, sampling, at = _case(name)
    expected = pair.source.run(prompt, sampling)
    since = len(pair.target.events)
    journey = begin(pair, prompt, sampling, at=at)
    journey.go()
    same(whole(journey), expected)
    assert journey.stopped is not None
    assert len(journey.stopped.output_token_ids) < len(expected.tokens), "it moved while it decoded"
    assert not recomputed(pair.target, since), "nothing was computed again"
    settled(pair)


def test_a_sequence_moves_there_and_back(pair: Pair) -> None:
    sampling = Sampling(max_tokens=150, seed=3, temperature=0.9, presence_penalty=0.4, ignore_eos=True)
    prompt = prompt_of(90, salt=40)
    expected = pair.source.run(prompt, sampling)
    there = begin(pair, prompt, sampling, at=30)
    there.go()
    assert there.stopped is not None
    back = begin(pair.turned(), prompt, sampling, at=80, before=there.stopped.output_token_ids, name=there.name)
    back.go()
    same(whole(back), expected)
    settled(pair)


def test_a_frozen_sequence_that_stays_goes_on_where_it_stood(pair: Pair) -> None:
    sampling = Sampling(max_tokens=120, seed=4, frequency_penalty=0.3, logprobs=2, ignore_eos=True)
    prompt = prompt_of(70, salt=41)
    expected = pair.source.run(prompt, sampling)
    others = [pair.source.add(prompt_of(20, salt=60 + index), sampling) for index in range(3)]
    journey = begin(pair, prompt, sampling, at=30)
    for _ in range(3):
        assert isinstance(journey.lease(), KvLeaseTaken)
        stopped = journey.freeze()
        assert isinstance(stopped, SequenceStopped)
        pair.source.until(lambda: len(pair.source.decoded[others[0]].tokens) > 0)
        assert len(pair.source.decoded[journey.name].tokens) == len(stopped.output_token_ids), "it stands still"
        journey.end(moved=False)
        journey.migration = pair.migration()
    same(pair.source.finish(journey.name)[0], expected)
    pair.source.finish(*others)
    settled(pair)


def test_a_frozen_sequence_leaves_the_engine_idle(pair: Pair) -> None:
    journey = begin(pair, prompt_of(40, salt=42), GREEDY, at=10)
    journey.lease()
    stopped = journey.freeze()
    steps = _steps(pair.source)
    pair.source.until(lambda: _held(pair.source) == len(stopped.blocks))
    pair.source.loop.run_until_complete(asyncio.sleep(0.1))
    assert _steps(pair.source) <= steps + 1
    journey.end(moved=False)
    pair.source.finish(journey.name)
    settled(pair)


def test_sequences_move_both_ways_among_others(pair: Pair) -> None:
    """Three out and three in at a time, with others on both sides; nobody's tokens change."""
    samplings = [
        GREEDY,
        Sampling(max_tokens=130, seed=5, ignore_eos=True),
        Sampling(max_tokens=150, seed=6, logprobs=1),
    ]
    prompts = [prompt_of(30 + 25 * index, salt=70 + index) for index in range(3)]
    expected = [pair.source.run(prompt, sampling) for prompt, sampling in zip(prompts, samplings, strict=True)]
    ways = (pair, pair.turned())
    others = [
        (way.source, way.source.add(prompt, sampling))
        for way in ways
        for prompt, sampling in zip(prompts, samplings, strict=True)
    ]
    journeys = []
    for way in ways:
        for prompt, sampling in zip(prompts, samplings, strict=True):
            journeys.append(journey := begin(way, prompt, sampling, at=20))
            journey.lease()
            assert isinstance(journey.freeze(), SequenceStopped)
    for journey in journeys:
        assert isinstance(journey.reserve(), KvRoomReserved)
    for journey in journeys:
        assert isinstance(journey.pull(), KvBlocksRead)
    for journey in journeys:
        journey.commit()
    for journey in journeys:
        journey.end(moved=True)
    for journey, alone in zip(journeys, expected * 2, strict=True):
        same(whole(journey), alone)
    for (engine, name), alone in zip(others, expected * 2, strict=True):
        same(engine.finish(name)[0], alone)
    settled(pair)


def test_several_rounds_bring_what_was_decoded_since(pair: Pair) -> None:
    prompt = prompt_of(64, salt=43)
    expected = pair.source.run(prompt, GREEDY)
    since = len(pair.target.events)
    journey = begin(pair, prompt, GREEDY, at=5)
    journey.lease()
    assert isinstance(journey.reserve(blocks=8), KvRoomReserved)
    for tokens in (5, 45, 90):
        until_tokens(pair.source, journey.name, tokens)
        assert isinstance(journey.lease(from_block=journey.have), KvLeaseTaken)
        assert isinstance(journey.pull(), KvBlocksRead)
    journey.freeze()
    assert journey.stopped is not None
    assert len(journey.stopped.blocks) <= 2, "the rounds have brought the rest"
    journey.commit()
    journey.end(moved=True)
    same(whole(journey), expected)
    assert not recomputed(pair.target, since)
    settled(pair)


def test_what_the_target_has_in_its_prefix_cache_does_not_travel(pair: Pair) -> None:
    turned = pair.turned()  # the target of these tests has no prefix cache
    prompt = prompt_of(200, salt=44)
    expected = turned.target.run(prompt, GREEDY)
    journey = begin(turned, prompt, GREEDY, at=40)
    journey.lease()
    room = journey.reserve()
    assert room.matched_blocks >= 200 // 32
    journey.lease(from_block=journey.have)
    read = journey.pull()
    assert read.bytes == len(journey.leased.blocks if journey.leased else []) * journey.endpoint().block_bytes
    journey.freeze()
    journey.commit()
    journey.end(moved=True)
    same(whole(journey), expected)
    settled(pair)


def test_pulled_blocks_are_found_by_nobody_before_the_sequence_comes(pair: Pair) -> None:
    turned = pair.turned()
    prompt = prompt_of(128, salt=45)
    sampling = Sampling(max_tokens=200, temperature=0.0, ignore_eos=True)
    journey = begin(turned, prompt, sampling, at=3)
    journey.lease()
    journey.reserve()
    journey.pull()
    before = turned.target.run(prompt, Sampling(max_tokens=2, temperature=0.0)).first
    assert before is not None
    assert before.cached_tokens == 0
    journey.freeze()
    journey.commit()
    journey.end(moved=True)
    tokens = whole(journey).tokens
    assert journey.stopped is not None
    computed = journey.stopped.computed_tokens
    known = [*prompt, *tokens[: computed + 1 - len(prompt)]]
    after = turned.target.run(known, Sampling(max_tokens=2, temperature=0.0)).first
    assert after is not None
    assert after.cached_tokens == computed // 32 * 32
    settled(pair)


def test_a_sequence_that_was_moved_and_then_preempted_is_still_the_same(pair: Pair) -> None:
    sampling = Sampling(max_tokens=200, seed=9, ignore_eos=True)
    prompt = prompt_of(150, salt=46)
    expected = pair.source.run(prompt, sampling)
    journey = begin(pair, prompt, sampling, at=20)
    journey.go()
    crowd = [pair.target.add(prompt_of(150, salt=80 + index), sampling) for index in range(6)]
    same(whole(journey), expected)
    pair.target.finish(*crowd)
    assert pair.target.decoded[journey.name].preemptions + sum(pair.target.decoded[n].preemptions for n in crowd) > 0
    settled(pair)


def test_ending_an_unknown_lease_is_no_error(pair: Pair) -> None:
    tell(pair.source, EndLeaseInEngine(migration="nobody", moved=True))
    settled(pair)


def _steps(engine: BenchEngine) -> int:
    last = engine.snapshot()
    return last.step if last else 0


def _held(engine: BenchEngine) -> int:
    last = engine.snapshot()
    return last.blocks_total - last.blocks_free if last else 0


def test_who_comes_while_a_long_prompt_is_computed_decodes_beside_it(pair: Pair) -> None:
    """The prompt could take every step's whole budget: vLLM serves who runs before who comes."""
    prompt = prompt_of(40, salt=44)
    expected = pair.source.run(prompt, GREEDY)
    target, came_in_time = pair.target, False
    for attempt in range(8):
        journey = begin(pair, prompt, GREEDY, at=10)
        assert isinstance(journey.lease(), KvLeaseTaken)
        assert isinstance(journey.reserve(), KvRoomReserved)
        assert isinstance(journey.freeze(), SequenceStopped)
        since = len(target.events)
        long = target.add(prompt_of(1000, salt=45 + attempt), Sampling(max_tokens=2, temperature=0.0))
        target.until(lambda since=since: any(isinstance(e, EngineStepped) for e in target.events[since:]))  # type: ignore[misc]
        journey.commit()
        journey.end(moved=True)
        same(whole(journey), expected)
        target.finish(long)
        added = _steps_until(target, since, _adds(journey.name))
        decoded, answered = (_steps_until(target, since, _outputs(name)) for name in (journey.name, long))
        # One step may have been under way, and told before the word that it was added.
        came_in_time = answered > added + 3
        if came_in_time:
            assert decoded <= added + 2
            break
    assert came_in_time, "the prompt was computed each time before it came"
    settled(pair)


def _steps_until(engine: BenchEngine, since: int, found: Callable[[EngineEvent], bool]) -> int:
    """Steps told before the first such event after so many."""
    events = engine.events[since:]
    first = next(index for index, event in enumerate(events) if found(event))
    return sum(isinstance(event, EngineStepped) for event in events[:first])


def _adds(name: str) -> Callable[[EngineEvent], bool]:
    return lambda event: isinstance(event, SequenceAdded) and event.sequence == name


def _outputs(name: str) -> Callable[[EngineEvent], bool]:
    return lambda event: isinstance(event, EngineStepped) and any(out.sequence == name for out in event.outputs)
