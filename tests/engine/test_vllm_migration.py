"""A running sequence moves to another engine with its KV, and goes on as if it never had."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from millrace.actor.engine import EngineStepped
from millrace.contracts.worker import Sampling, StructuredOutput

from tests.engine import tiny_llama
from tests.engine.bench_engine import BenchEngine, Decoded, config
from tests.engine.moving import Pair, begin, whole

#: Starting engines takes a minute where other test runs share the cores.
pytestmark = pytest.mark.timeout(300)


def _prompt(length: int, salt: int = 0) -> list[int]:
    """Prompts that share no block."""
    return [(salt * 7919 + index * index * 31 + index) % 250 + 1 for index in range(length)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.build(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[Pair]:
    """The target has another seed and another budget."""
    source = BenchEngine(config(model))
    target = BenchEngine(config(model, seed=99, max_num_batched_tokens=64))
    yield Pair(source, target)
    for engine in (source, target):
        engine.stop()


SCHEMA = (
    '{"type":"object","properties":{"name":{"type":"string","maxLength":12},"tags":{"type":"array",'
    '"items":{"enum":["x","yy"]},"minItems":1,"maxItems":3}},"required":["name","tags"],"additionalProperties":false}'
)
GREEDY = Sampling(max_tokens=160, temperature=0.0, ignore_eos=True)
#: Name, prompt's length, sampling, output tokens at which it moves.
CASES: list[tuple[str, int, Sampling, int]] = [
    ("one_token", 8, GREEDY, 1),
    ("short", 8, GREEDY, 30),
    ("a_block_less_one", 31, GREEDY, 3),
    ("a_block", 32, GREEDY, 20),
    ("long", 500, GREEDY, 60),
    ("late", 100, GREEDY, 140),
    ("seed", 150, Sampling(max_tokens=160, seed=12, temperature=0.8, top_p=0.9, top_k=40, ignore_eos=True), 40),
    (
        "penalties",
        150,
        Sampling(
            max_tokens=160,
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
        Sampling(max_tokens=160, min_tokens=90, seed=8, logit_bias={99: 7.0}, stop_token_ids=[99]),
        30,
    ),
    ("json_schema", 60, Sampling(max_tokens=80, seed=6, structured=StructuredOutput(json_schema=SCHEMA)), 9),
]


def _case(name: str) -> tuple[list[int], Sampling, int]:
    _, length, sampling, at = next(case for case in CASES if case[0] == name)
    return _prompt(length, salt=len(name)), sampling, at


def _same(moved: Decoded, expected: Decoded) -> None:
    assert moved.tokens == expected.tokens
    assert moved.finish == expected.finish
    for one, other in zip(moved.logprobs, expected.logprobs, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def _settled(*pairs: Pair) -> None:
    """Every block is free again on both sides."""
    for pair in pairs:
        for engine in (pair.source, pair.target):
            engine.until(engine.idle)
            assert not engine.failures()


def _computed_prompts(engine: BenchEngine, since: int) -> int:
    """Prompt tokens that an engine computed in the steps it told after so many events."""
    steps = [event for event in engine.events[since:] if isinstance(event, EngineStepped) and event.snapshot]
    return sum(event.snapshot.batch.prefill_tokens for event in steps if event.snapshot)


@pytest.mark.parametrize("name", [case[0] for case in CASES])
def test_a_sequence_that_moves_goes_on_the_same(pair: Pair, name: str) -> None:
    prompt, sampling, at = _case(name)
    expected = pair.source.run(prompt, sampling)
    since = len(pair.target.events)
    journey = begin(pair, prompt, sampling, at=at)
    journey.go()
    _same(whole(journey), expected)
    assert journey.stopped is not None
    assert len(journey.stopped.output_token_ids) < len(expected.tokens), "it moved while it decoded"
    assert _computed_prompts(pair.target, since) == 0, "nothing was computed again"
    _settled(pair)
