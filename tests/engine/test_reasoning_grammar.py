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
    engine = BenchEngine(config(thinker))
    yield engine
    engine.stop()


def test_a_grammar_holds_from_the_end_of_the_reasoning_on_wherever_a_sequence_breaks(
    thinker: Path, engine: BenchEngine
) -> None:
    tokenizer = Tokenizer.from_file(str(thinker / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab()
    begin, end = vocabulary["<think>"], vocabulary["</think>"]
    prompt = [1, 2, 3, begin]
    late = StructuredOutput(regex=PATTERN, after_reasoning="{}")
    # Whatever may come, the end of the reasoning comes next: only the grammar keeps it away.
    sampling = Sampling(max_tokens=60, temperature=0.0, logit_bias={end: 100.0}, structured=late)
    whole = THOUGHTS + engine.run(prompt, sampling, THOUGHTS).tokens
    assert whole[len(THOUGHTS)] == end
    assert re.fullmatch(PATTERN, tokenizer.decode(whole[len(THOUGHTS) + 1 :]))
    for split in range(len(THOUGHTS), len(whole)):
        assert whole[:split] + engine.run(prompt, sampling, whole[:split]).tokens == whole


def test_a_grammar_may_hold_from_the_first_token_on(thinker: Path, engine: BenchEngine) -> None:
    tokenizer = Tokenizer.from_file(str(thinker / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab()
    begin, end = vocabulary["<think>"], vocabulary["</think>"]
    at_once = StructuredOutput(regex=PATTERN)
    sampling = Sampling(max_tokens=60, temperature=0.0, logit_bias={end: 100.0}, structured=at_once)
    assert re.fullmatch(PATTERN, tokenizer.decode(engine.run([1, 2, 3, begin], sampling).tokens))


def test_a_budget_ends_the_reasoning_wherever_a_sequence_breaks(thinker: Path, engine: BenchEngine) -> None:
    vocabulary = Tokenizer.from_file(str(thinker / "tokenizer.json")).get_vocab()
    begin, end = vocabulary["<think>"], vocabulary["</think>"]
    never = Sampling(max_tokens=20, temperature=0.0, ignore_eos=True, logit_bias={end: -100.0})
    assert end not in engine.run([1, 2, 3, begin], never).tokens
    for prompt in ([1, 2, 3, begin], [1, 2, 3, begin, 7, 11]):
        sampling = msgspec.structs.replace(never, thinking_token_budget=8)
        whole = engine.run(prompt, sampling).tokens
        assert whole.index(end) == 8 - (len(prompt) - 4)
        for split in range(1, len(whole)):
            assert whole[:split] + engine.run(prompt, sampling, whole[:split]).tokens == whole


def test_a_model_without_a_reasoning_parser_refuses_a_budget(tmp_path: Path) -> None:
    engine = BenchEngine(config(tiny_llama.build(tmp_path)))
    try:
        assert "reasoning" in engine.rejection(engine.add([1], Sampling(max_tokens=4, thinking_token_budget=2)))
    finally:
        engine.stop()
