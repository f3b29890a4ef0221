"""A sequence broken at any token goes on elsewhere as if it had never stopped."""

from functools import partial
from pathlib import Path

import pytest
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

#: Name, prompt, sampling, break points.
CASES: list[tuple[str, list[int], Sampling, list[int]]] = [
    ("greedy", PROMPT, Sampling(max_tokens=48, temperature=0.0), [1, 2, 31, 32, 33, 47]),
    ("greedy_long_prompt", LONG, Sampling(max_tokens=30, temperature=0.0), [1, 20, 21, 29]),
    ("seed_long_prompt", LONG, Sampling(max_tokens=30, seed=3), [1, 2, 17, 29]),
    (
        "json_schema",
        PROMPT,
        Sampling(max_tokens=80, seed=6, structured=StructuredOutput(json_schema=SCHEMA)),
        list(range(1, 60)),
    ),
    (
        "regex",
        PROMPT,
        Sampling(max_tokens=60, temperature=0.0, structured=StructuredOutput(regex="(abc|de){3,9}!")),
        list(range(1, 28)),
    ),
    (
        "choice",
        PROMPT,
        Sampling(max_tokens=30, seed=1, structured=StructuredOutput(choice=["certainly", "certainly not"])),
        list(range(1, 12)),
    ),
    (
        "grammar",
        PROMPT,
        Sampling(
            max_tokens=40,
            temperature=0.0,
            logit_bias={64: -20.0},  # the letter that would end it
            structured=StructuredOutput(grammar='root ::= "(" inner ")"\ninner ::= "a" | "b" inner | "c" inner'),
        ),
        [1, 2, 3, 5, 11],
    ),
    (
        "json_object",
        PROMPT,
        # Without the bias against a closing brace it is empty.
        Sampling(max_tokens=40, seed=2, logit_bias={92: -20.0}, structured=StructuredOutput(json_object=True)),
        [1, 7, 20],
    ),
]


@pytest.fixture
def source(pair: Pair) -> BenchEngine:
    return pair.source


@pytest.fixture
def target(pair: Pair) -> BenchEngine:
    """Another engine: another seed, another budget, no prefix cache."""
    return pair.target


def _same(whole: Decoded, rest: Decoded, split: int) -> None:
    assert rest.tokens == whole.tokens[split:]
    assert rest.finish == whole.finish
    for one, other in zip(whole.logprobs[split:], rest.logprobs, strict=True):
        assert other.token_ids == one.token_ids
        assert other.rank == one.rank
        assert other.logprobs == pytest.approx(one.logprobs, abs=1e-4)


@pytest.mark.parametrize("name", [case[0] for case in CASES])
def test_a_break_changes_nothing_on_another_engine(source: BenchEngine, target: BenchEngine, name: str) -> None:
    _, prompt, sampling, splits = next(case for case in CASES if case[0] == name)
    whole = source.run(prompt, sampling)
    assert len(whole.tokens) >= 8, "too short to break"
    splits = [split for split in splits if split < len(whole.tokens)]
    assert len(splits) >= 2
    # All at once: a continuation must not depend on what else is in the batch either.
    names = [target.add(prompt, sampling, whole.tokens[:split]) for split in splits]
    for split, rest in zip(splits, target.finish(*names), strict=True):
        _same(whole, rest, split)


def test_a_break_changes_nothing_on_the_same_engine_with_its_cache(source: BenchEngine) -> None:
    sampling = Sampling(max_tokens=120, seed=21, frequency_penalty=0.4, logprobs=2, ignore_eos=True)
    whole = source.run(LONG, sampling)
    for split in (1, 20, 21, 84, 119):
        rest = source.run(LONG, sampling, whole.tokens[:split])
        _same(whole, rest, split)
    assert rest.first is not None
    # The cache reaches into the earlier output; only prompt tokens are told as cached.
    assert rest.first.cached_tokens == len(LONG)


def test_several_breaks_in_a_row_change_nothing(source: BenchEngine, target: BenchEngine) -> None:
    sampling = Sampling(max_tokens=60, seed=14, presence_penalty=0.6)
    whole = source.run(PROMPT, sampling)
    tokens: list[int] = []
    for engine in (target, source, target, source):
        name = engine.add(PROMPT, sampling, tokens)
        engine.until(partial(_seven_or_ended, engine, name))
        engine.cancel(name)
        tokens += engine.decoded[name].tokens
    tokens += target.run(PROMPT, sampling, tokens).tokens if len(tokens) < len(whole.tokens) else []
    assert tokens == whole.tokens


def test_a_preempted_continuation_is_still_the_same(source: BenchEngine) -> None:
    sampling = Sampling(max_tokens=300, seed=31, ignore_eos=True)
    whole = source.run(PROMPT, sampling)
    rests = source.finish(*[source.add(PROMPT, sampling, whole.tokens[:100]) for _ in range(11)])
    assert sum(rest.preemptions for rest in rests) > 0
    for rest in rests:
        _same(whole, rest, 100)


@pytest.mark.skipif(not (SHIPPED / "model.safetensors").exists(), reason=f"{SHIPPED} has no weights yet")
def test_a_shipped_model_goes_on_the_same_in_its_own_precision() -> None:
    """bfloat16 leaves room for a difference between recomputing and decoding; a trained model's choices leave none."""
    fields = {"dtype": "auto", "max_model_len": 1024}
    first, second = (BenchEngine(config(SHIPPED, **fields, enable_prefix_caching=cache)) for cache in (True, False))
    try:
        prompts = [[1, 4, 20 + index, 40, 50 + 2 * index, 60, 2, 5] for index in range(12)]
        greedy = Sampling(max_tokens=80, temperature=0.0, ignore_eos=True)
        wholes = first.finish(*[first.add(prompt, greedy) for prompt in prompts])
        splits = [1 + 6 * index for index in range(12)]
        rests = second.finish(
            *[
                second.add(prompt, greedy, whole.tokens[:split])
                for prompt, whole, split in zip(prompts, wholes, splits, strict=True)
            ]
        )
    finally:
        first.stop()
        second.stop()
    for whole, rest, split in zip(wholes, rests, splits, strict=True):
        _same(whole, rest, split)


def test_tokens_that_break_the_grammar_end_that_one_sequence(source: BenchEngine) -> None:
    from millrace.contracts.ingress import FinishReason

    sampling = Sampling(max_tokens=30, structured=StructuredOutput(choice=["yes", "no"]))
    bad = source.run(PROMPT, sampling, [1, 2, 3])
    assert bad.finish is FinishReason.ERROR
    assert source.run(PROMPT, Sampling(max_tokens=3)).finish is not None


def _seven_or_ended(engine: BenchEngine, name: str) -> bool:
    decoded = engine.decoded.get(name)
    return decoded is not None and (len(decoded.tokens) >= 7 or decoded.finish is not None)
