"""The task family: prompts, answers and checks agree; the tokenizer loses nothing; what ships fits its limits."""

import json
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from models.training.tasks import LEVELS, TASKS, Example, held_out, make
from models.training.tokenizer import EOS, VOCABULARY_SIZE, build_tokenizer, token_id

MODELS = Path(__file__).parents[2] / "models"
SIZES = ("nano", "micro", "mini")
KINDS = [(task, level) for task in TASKS for level in LEVELS]


def draw(task: str, level: int, seed: int = 0, count: int = 30) -> list[Example]:
    rng = Random(f"{seed} {task} {level}")
    return [make(task, rng, level) for _ in range(count)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_tokenizer()


@pytest.mark.parametrize(("task", "level"), KINDS)
def test_a_check_rejects_a_damaged_answer(task: str, level: int) -> None:
    for example in draw(task, level):
        middle = len(example.answer) // 2
        # No answer has a tilde, a doubled ending, or nothing in it.
        for damaged in (
            example.answer[:middle] + "~" + example.answer[middle + 1 :],
            example.answer + " " + example.answer[-1],
            example.answer[:-1] + "~",
            "",
        ):
            assert not example.check(damaged), (example.prompt, damaged)


def test_answers_take_from_one_token_to_about_two_thousand(tokenizer: Tokenizer) -> None:
    lengths = [
        len(tokenizer.encode(example.answer, add_special_tokens=False).ids)
        for task, level in KINDS
        for example in draw(task, level, count=60)
    ]
    assert min(lengths) == 1
    assert 1500 < max(lengths) <= 2048


@pytest.mark.parametrize("task", TASKS)
def test_about_an_eighth_of_the_prompts_is_held_out(task: str) -> None:
    prompts = {example.prompt for level in LEVELS for example in draw(task, level, count=400)}
    share = sum(map(held_out, prompts)) / len(prompts)
    assert 0.03 < share < 0.25


@given(st.text())
def test_any_text_comes_back_from_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("size", SIZES)
def test_a_shipped_tokenizer_is_the_one_that_the_code_builds(size: str) -> None:
    folder = MODELS / f"millrace-{size}"
    shipped = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert json.loads(shipped.to_str()) == json.loads(build_tokenizer().to_str())
    config = json.loads((folder / "config.json").read_text())
    assert config["vocab_size"] == VOCABULARY_SIZE
    assert config["eos_token_id"] == token_id(shipped, EOS)


def test_the_shipped_models_take_at_most_25_megabytes() -> None:
    files = [file for size in SIZES for file in (MODELS / f"millrace-{size}").iterdir()]
    assert sum(file.stat().st_size for file in files) <= 25_000_000
