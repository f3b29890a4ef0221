"""Grammars and budgets that know the reasoning, in real vLLM: also where the sequence began elsewhere."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from millrace.contracts.worker import Sampling, StructuredOutput
from tokenizers import Tokenizer

from tests.engine.bench_engine import BenchEngine, config
from tests.engine.moving import Pair
from tests.testbed import tiny_llama

THOUGHTS = [7, 11, 13]
PATTERN = "(abc|de){3,9}!"


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose folder says that it thinks."""
    folder = tiny_llama.build(tmp_path_factory.mktemp("thinker"))
    described = (folder / "tokenizer.json").read_text()
    described = described.replace("<extra0>", "<think>").replace("<extra1>", "</think>")
    (folder / "tokenizer.json").write_text(described)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{% for m in messages %}{{ m.content }}{% endfor %}<think>"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def engine(thinker: Path) -> Iterator[BenchEngine]:
    with BenchEngine(config(thinker)) as engine:
        yield engine


@pytest.fixture(scope="module")
def tokenizer(thinker: Path) -> Tokenizer:
    return Tokenizer.from_file(str(thinker / "tokenizer.json"))


@pytest.fixture(scope="module")
def prompt(tokenizer: Tokenizer) -> list[int]:
    """It ends with the token that begins the reasoning."""
    return [1, 2, 3, tokenizer.token_to_id("<think>")]


@pytest.fixture(scope="module")
def end(tokenizer: Tokenizer) -> int:
    """The token that ends the reasoning."""
    return tokenizer.token_to_id("</think>")


def goes_on_anywhere(
    engine: BenchEngine, prompt: list[int], sampling: Sampling, whole: list[int], *, first: int
) -> None:
    """Broken after any token from ``first`` on, a sequence says the rest of what it says whole."""
    splits = range(first, len(whole))
    rests = engine.finish(*[engine.add(prompt, sampling, whole[:split]) for split in splits])
    assert [whole[:split] + rest.tokens for split, rest in zip(splits, rests, strict=True)] == [whole] * len(splits)


def test_a_grammar_holds_from_the_end_of_the_reasoning_on_wherever_a_sequence_breaks(
    engine: BenchEngine, tokenizer: Tokenizer, prompt: list[int], end: int
) -> None:
    late = StructuredOutput(regex=PATTERN, after_reasoning="{}")
    # Whatever may come, the end of the reasoning comes next: only the grammar keeps it away.
    sampling = Sampling(max_tokens=60, temperature=0.0, logit_bias={end: 100.0}, structured=late)
    whole = THOUGHTS + engine.run(prompt, sampling, THOUGHTS).tokens
    assert whole[len(THOUGHTS)] == end
    assert re.fullmatch(PATTERN, tokenizer.decode(whole[len(THOUGHTS) + 1 :]))
    goes_on_anywhere(engine, prompt, sampling, whole, first=len(THOUGHTS))


def test_a_grammar_may_hold_from_the_first_token_on(
    engine: BenchEngine, tokenizer: Tokenizer, prompt: list[int], end: int
) -> None:
    at_once = StructuredOutput(regex=PATTERN)
    sampling = Sampling(max_tokens=60, temperature=0.0, logit_bias={end: 100.0}, structured=at_once)
    assert re.fullmatch(PATTERN, tokenizer.decode(engine.run(prompt, sampling).tokens))


@pytest.mark.parametrize("reasoned", [0, 2])
def test_a_budget_ends_the_reasoning_wherever_a_sequence_breaks(
    engine: BenchEngine, prompt: list[int], end: int, reasoned: int
) -> None:
    prompt = [*prompt, *THOUGHTS[:reasoned]]
    never = Sampling(max_tokens=20, temperature=0.0, ignore_eos=True, logit_bias={end: -100.0})
    assert end not in engine.run(prompt, never).tokens
    sampling = msgspec.structs.replace(never, thinking_token_budget=8)
    whole = engine.run(prompt, sampling).tokens
    assert whole.index(end) == 8 - reasoned
    goes_on_anywhere(engine, prompt, sampling, whole, first=1)


def test_a_model_without_a_reasoning_parser_refuses_a_budget(pair: Pair) -> None:
    engine = pair.source
    assert "reasoning" in engine.rejection(engine.add([1], Sampling(max_tokens=4, thinking_token_budget=2)))


def test_a_constraint_is_tried_once_and_then_remembered(engine: BenchEngine) -> None:
    """The last: what tries constraints is gone then."""
    constraint = StructuredOutput(choice=["certainly", "perhaps"])
    sampling = Sampling(max_tokens=40, temperature=0.0, structured=constraint)
    first = engine.run(THOUGHTS, sampling)
    assert engine.engine._grammars.known(constraint)
    engine.engine._grammars._process.kill()
    assert engine.run(THOUGHTS, sampling).tokens == first.tokens
    refused = engine.add(THOUGHTS, Sampling(max_tokens=5, structured=StructuredOutput(regex="never tried")))
    assert "has ended" in engine.rejection(refused)
