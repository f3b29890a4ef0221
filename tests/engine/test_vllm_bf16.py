"""Exactness in bfloat16: a move with its KV changes nothing, a recompute keeps the known tokens and rounds differently.

This is the table of docs/MIGRATION.md ("What stays exact") on two real engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from millrace.contracts.ingress import TokenLogprobs
from millrace.contracts.worker import Sampling

from tests.engine.bench_engine import BenchEngine, Decoded, config
from tests.engine.moving import Pair, begin, prompt_of, recomputed, settled, whole
from tests.testbed import tiny_llama

if TYPE_CHECKING:
    from pathlib import Path


TOKENS, AT = 200, 80
GREEDY = Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, logprobs=4)
SEEDED = Sampling(max_tokens=TOKENS, temperature=0.8, seed=5, ignore_eos=True, logprobs=4)
#: Far above what rounding does to a log-probability, far below what wrong KV does.
DRIFT_MAX = 0.25


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    model: Path = tiny_llama.build(tmp_path_factory.mktemp("bf16"))
    fields = {"dtype": "bfloat16", "enable_prefix_caching": False}
    pair = Pair(BenchEngine(config(model, **fields)), BenchEngine(config(model, **fields), "t"))
    yield pair
    for engine in (pair.source, pair.target):
        engine.stop()


@pytest.fixture(scope="module")
def undisturbed(bf16: Pair) -> dict[str, Decoded]:
    """Outputs of the source, alone in its batch as the moved ones are."""
    return {name: bf16.source.run(_prompt(name), sampling) for name, sampling in SAMPLINGS.items()}


SAMPLINGS = {"greedy": GREEDY, "seeded": SEEDED}


def _prompt(name: str) -> list[int]:
    return prompt_of(100, salt=len(name))


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_move_with_its_kv_keeps_tokens_and_log_probabilities_to_the_bit(
    bf16: Pair, undisturbed: dict[str, Decoded], name: str
) -> None:
    since = len(bf16.target.events)
    journey = begin(bf16, _prompt(name), SAMPLINGS[name], at=AT)
    journey.go()
    moved = whole(journey)
    assert not recomputed(bf16.target, since), "nothing was computed again"
    assert moved.tokens == undisturbed[name].tokens
    assert [each.logprobs for each in moved.logprobs] == [each.logprobs for each in undisturbed[name].logprobs]
    settled(bf16)


def test_a_recompute_keeps_the_known_tokens_and_may_take_another_only_where_two_are_close(
    bf16: Pair, undisturbed: dict[str, Decoded]
) -> None:
    expected = undisturbed["greedy"]
    rest = bf16.target.run(_prompt("greedy"), GREEDY, expected.tokens[:AT])
    assert len(rest.tokens) == TOKENS - AT
    same = _equal(expected.tokens[AT:], rest.tokens)
    drift = max(
        abs(one.logprobs[0] - other.logprobs[0])
        for one, other in zip(expected.logprobs[AT:][:same], rest.logprobs, strict=False)
    )
    print(f"{same} of {len(rest.tokens)} tokens equal, their log-probabilities by at most {drift:.4f} apart")
    assert drift < DRIFT_MAX
    if same < len(rest.tokens):
        assert _gap(rest.logprobs[same], expected.tokens[AT + same]) < DRIFT_MAX


def _equal(one: list[int], other: list[int]) -> int:
    """Tokens up to the first that differs."""
    return next((i for i, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), len(one))


def _gap(entry: TokenLogprobs, other: int) -> float:
    """Log-probability by which the sampled token is ahead of another one, which must be among the likeliest."""
    values = dict(zip(entry.token_ids, entry.logprobs, strict=True))
    assert other in values, f"{other} is not among {entry}"
    return entry.logprobs[0] - values[other]
