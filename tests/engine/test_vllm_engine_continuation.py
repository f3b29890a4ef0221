"""A sequence broken at any token goes on elsewhere as if it had never stopped."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from millrace.contracts.ingress import FinishReason
from millrace.contracts.worker import Sampling, StructuredOutput

from tests.engine.bench_engine import BenchEngine, Decoded, config
from tests.engine.moving import Pair

PROMPT = [7, 11, 13, 17, 19, 23, 29, 31]
SHIPPED = Path(__file__).resolve().parents[2] / "models" / "millrace-nano"
LONG = [index % 250 + 1 for index in range(300)]
SCHEMA = (
    '{"type":"object","properties":{"name":{"type":"string","maxLength":12},"tags":{"type":"array",'
    '"items":{"enum":["x","yy"]},"minItems":1,"maxItems":3}},"required":["name","tags"],"additionalProperties":false}'
)

#: Sampling, and where it breaks.
CASES: dict[str, tuple[Sampling, Sequence[int]]] = {
    "seed": (Sampling(max_tokens=30, seed=3), [1, 2, 17, 29]),
    "json_schema": (Sampling(max_tokens=80, seed=6, structured=StructuredOutput(json_schema=SCHEMA)), range(1, 60)),
    "regex": (
        Sampling(max_tokens=60, temperature=0.0, structured=StructuredOutput(regex="(abc|de){3,9}!")),
        range(1, 28),
    ),
    "choice": (
        Sampling(max_tokens=30, seed=1, structured=StructuredOutput(choice=["certainly", "certainly not"])),
        range(1, 12),
    ),
    "grammar": (
        Sampling(
            max_tokens=40,
            temperature=0.0,
            logit_bias={64: -20.0},  # the letter that would end it
            structured=StructuredOutput(grammar='root ::= "(" inner ")"\ninner ::= "a" | "b" inner | "c" inner'),
        ),
        [1, 2, 3, 5, 11],
    ),
    "json_object": (
        # Without the bias against a closing brace it is empty.
        Sampling(max_tokens=40, seed=2, logit_bias={92: -20.0}, structured=StructuredOutput(json_object=True)),
        [1, 7, 20],
    ),
}


def _same(whole: Decoded, rest: Decoded, split: int) -> None:
    assert rest.tokens == whole.tokens[split:]
    assert rest.finish == whole.finish
    for one, other in zip(whole.logprobs[split:], rest.logprobs, strict=True):
        assert other.token_ids == one.token_ids
        assert other.rank == one.rank
        assert other.logprobs == pytest.approx(one.logprobs, abs=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_a_break_changes_nothing_on_another_engine(pair: Pair, name: str) -> None:
    prompt = LONG if name == "seed" else PROMPT
    sampling, splits = CASES[name]
    whole = pair.source.run(prompt, sampling)
    assert len(whole.tokens) >= 8, "too short to break"
    splits = [split for split in splits if split < len(whole.tokens)]
    assert len(splits) >= 2
    # All at once: a continuation must not depend on what else is in the batch either.
    names = [pair.target.add(prompt, sampling, whole.tokens[:split]) for split in splits]
    for split, rest in zip(splits, pair.target.finish(*names), strict=True):
        _same(whole, rest, split)


def test_only_tokens_of_the_prompt_are_told_as_cached(engine: BenchEngine) -> None:
    sampling = Sampling(max_tokens=100, temperature=0.0, ignore_eos=True)
    whole = engine.run(LONG, sampling)
    rest = engine.run(LONG, sampling, whole.tokens[:84])  # the cache reaches into these
    _same(whole, rest, 84)
    assert rest.first.cached_tokens == len(LONG)


def test_a_preempted_continuation_is_still_the_same(engine: BenchEngine) -> None:
    sampling = Sampling(max_tokens=300, seed=31, ignore_eos=True)
    whole = engine.run(PROMPT, sampling)
    rests = engine.finish(*[engine.add(PROMPT, sampling, whole.tokens[:100]) for _ in range(11)])
    assert sum(rest.preemptions for rest in rests) > 0
    for rest in rests:
        _same(whole, rest, 100)


def test_a_shipped_model_goes_on_the_same_in_its_own_precision() -> None:
    """bfloat16 leaves room for a difference between recomputing and decoding; a trained model's choices leave none."""
    with BenchEngine(config(SHIPPED, dtype="auto", max_model_len=1024, enable_prefix_caching=False)) as engine:
        prompts = [[1, 4, 20 + index, 40, 50 + 2 * index, 60, 2, 5] for index in range(12)]
        greedy = Sampling(max_tokens=80, temperature=0.0, ignore_eos=True)
        wholes = engine.finish(*[engine.add(prompt, greedy) for prompt in prompts])
        splits = [1 + 6 * index for index in range(12)]
        broken = [whole.tokens[:split] for whole, split in zip(wholes, splits, strict=True)]
        rests = engine.finish(*[engine.add(*each) for each in zip(prompts, [greedy] * 12, broken, strict=True)])
    for whole, rest, split in zip(wholes, rests, splits, strict=True):
        _same(whole, rest, split)


def test_tokens_that_break_the_grammar_end_that_one_sequence(engine: BenchEngine) -> None:
    sampling = Sampling(max_tokens=30, structured=StructuredOutput(choice=["yes", "no"]))
    bad = engine.run(PROMPT, sampling, [1, 2, 3])
    assert bad.finish is FinishReason.ERROR
    assert engine.run(PROMPT, Sampling(max_tokens=3)).finish is not None
