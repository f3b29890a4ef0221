"""A running sequence moves with its KV to an engine that is set up otherwise, and goes on as if it never had.

tests/contract/engine moves sequences of all kinds of sampling, between engines that are alike.
"""

import asyncio

import msgspec
import pytest
from millrace.contracts.worker import Sampling, StructuredOutput

from tests.engine.bench_engine import BenchEngine
from tests.engine.moving import Pair, begin, prompt_of, recomputed, same, settled, whole

SCHEMA = (
    '{"type":"object","properties":{"name":{"type":"string","maxLength":12},"tags":{"type":"array",'
    '"items":{"enum":["x","yy"]},"minItems":1,"maxItems":3}},"required":["name","tags"],"additionalProperties":false}'
)
GREEDY = Sampling(max_tokens=150, temperature=0.0, ignore_eos=True)
#: Name, prompt's length, sampling, output tokens at which it moves.
CASES: list[tuple[str, int, Sampling, int]] = [
    ("one_token", 8, GREEDY, 1),
    ("a_block_less_one", 31, GREEDY, 3),
    ("a_block", 32, GREEDY, 20),
    ("long", 500, GREEDY, 60),
    ("late", 100, GREEDY, 110),
    ("salted", 100, msgspec.structs.replace(GREEDY, cache_salt="of one tenant"), 40),
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
    assert len(journey.stopped.output_token_ids) < len(expected.tokens), "it moved while it decoded"
    assert not recomputed(pair.target, since), "nothing was computed again"
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


def _steps(engine: BenchEngine) -> int:
    last = engine.snapshot()
    return last.step if last else 0


def _held(engine: BenchEngine) -> int:
    last = engine.snapshot()
    return last.blocks_total - last.blocks_free if last else 0
