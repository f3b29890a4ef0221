"""The task family: prompts, answers and checks agree; the tokenizer loses nothing; what ships fits its limits."""

import json
import string
import struct
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from models.training import noisy
from models.training.tasks import EXACT, LEVELS, TASKS, Example, held_out, make
from models.training.tokenizer import EOS, ROLES, VOCABULARY_SIZE, build_tokenizer, token_id
from models.training.words import number_in_words

MODELS = Path(__file__).parents[2] / "models"
#: Size, and its number of parameters in millions.
SIZES = {"nano": 0.5, "micro": 2.0, "mini": 8.0}
KINDS = [(task, level) for task in TASKS for level in LEVELS]


def draw(task: str, level: int, seed: int = 0, count: int = 30) -> list[Example]:
    rng = Random(f"{seed} {task} {level}")
    return [make(task, rng, level) for _ in range(count)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_tokenizer()


@pytest.mark.parametrize(("task", "level"), KINDS)
def test_a_check_accepts_the_answer_with_blanks_around_it(task: str, level: int) -> None:
    for example in draw(task, level):
        assert example.check(example.answer)
        assert example.check(f" {example.answer}\n")


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


@pytest.mark.parametrize("task", EXACT)
def test_an_exact_check_rejects_the_answer_to_another_prompt(task: str) -> None:
    examples = draw(task, 2)
    for one in examples:
        for other in examples:
            assert one.check(other.answer) == (one.answer == other.answer)


@pytest.mark.parametrize(("task", "level"), KINDS)
def test_the_same_seed_draws_the_same_examples_and_another_seed_others(task: str, level: int) -> None:
    def texts(seed: int) -> list[tuple[str, str]]:
        return [(example.prompt, example.answer) for example in draw(task, level, seed)]

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(KeyError):
        make("juggle", Random(0))


def test_answers_take_from_one_token_to_about_two_thousand(tokenizer: Tokenizer) -> None:
    lengths = [
        len(tokenizer.encode(example.answer, add_special_tokens=False).ids)
        for task, level in KINDS
        for example in draw(task, level, count=60)
    ]
    assert min(lengths) == 1
    assert 1500 < max(lengths) <= 2048


@pytest.mark.parametrize("task", ["count", "words", "copy", "sort", "decode", "lines", "dice", "story", "listing"])
def test_answers_grow_with_the_level(task: str, tokenizer: Tokenizer) -> None:
    means = [
        sum(len(tokenizer.encode(example.answer).ids) for example in draw(task, level, count=100)) for level in LEVELS
    ]
    assert means == sorted(means)
    assert means[-1] > 1.5 * means[0]


@pytest.mark.parametrize("task", TASKS)
def test_about_an_eighth_of_the_prompts_is_held_out(task: str) -> None:
    prompts = {example.prompt for level in LEVELS for example in draw(task, level, count=400)}
    share = sum(map(held_out, prompts)) / len(prompts)
    assert 0.03 < share < 0.25


@pytest.mark.parametrize(
    ("prompt_part", "task", "right"),
    [
        ("Roll a die with", "dice", lambda e: e.answer.split()[-1] == e.prompt.rstrip(".").split()[-1]),
        ("How many times", "letters", lambda e: int(e.answer) >= 0),
        ("Compress", "encode", lambda e: set(e.answer) <= set(string.ascii_lowercase + string.digits)),
    ],
)
def test_answers_follow_from_their_prompts(prompt_part: str, task: str, right: object) -> None:
    matching = [example for example in draw(task, 2, count=60) if prompt_part in example.prompt]
    assert matching
    assert all(right(example) for example in matching)  # type: ignore[operator]


def test_encoding_and_decoding_runs_are_inverse() -> None:
    for example in draw("encode", 3):
        expanded = "".join(
            letter * int(digit) for letter, digit in zip(example.answer[::2], example.answer[1::2], strict=True)
        )
        assert example.prompt.endswith(expanded)


def test_worked_addition_ends_in_the_sum() -> None:
    for example in draw("add_steps", 3):
        _, a, _, b, *_ = example.prompt.split()
        assert example.answer.endswith(f"answer {int(a) + int(b)}")


def test_a_die_check_wants_the_face_last_and_only_last() -> None:
    example = next(e for e in draw("dice", 1, count=100) if e.prompt == "Roll a die with 6 sides until it shows 4.")
    assert example.check("1 2 6 4")
    assert example.check("4")
    for wrong in ("4 1 4", "1 2 3", "7 4", "0 4", "1  4", "one 4", "04", "²  4"):
        assert not example.check(wrong), wrong


def test_a_list_check_wants_different_things_of_the_kind() -> None:
    for example in draw("listing", 3):
        items = example.answer.split(", ")
        assert not example.check(", ".join([*items, items[0]]))
        assert not example.check(", ".join(["gravel", *items[1:]]))
        assert not example.check(items[0])


def test_a_story_check_wants_the_length_asked_for_and_the_subject() -> None:
    for example in draw("story", 3):
        sentences = example.answer.removesuffix(" The end.").split(". ")
        assert not example.check(f"{sentences[0]}. {sentences[1]}. The end.")


@pytest.mark.parametrize("task", noisy.TASKS)
def test_a_noisy_answer_has_many_lengths_for_one_prompt(task: str) -> None:
    lengths: dict[str, set[int]] = {}
    for example in draw(task, 1, count=3000):
        lengths.setdefault(example.prompt, set()).add(len(example.answer.split()))
    assert max(map(len, lengths.values())) >= 4


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "zero"), (19, "nineteen"), (40, "forty"), (99, "ninety nine"), (101, "one hundred and one")],
)
def test_numbers_are_spelled_in_words(number: int, words: str) -> None:
    assert number_in_words(number) == words


@given(st.text())
@settings(deadline=None)
def test_any_text_comes_back_from_the_tokenizer(text: str) -> None:
    tokenizer = build_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


def test_digits_and_unknown_letters_are_one_token_each(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("48213", add_special_tokens=False).tokens == list("48213")
    assert tokenizer.encode("qzvkx", add_special_tokens=False).tokens == list("qzvkx")
    assert tokenizer.encode("Count from", add_special_tokens=False).tokens == ["Count", "Ġfrom"]


def test_every_special_token_is_one_id_of_the_vocabulary(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == VOCABULARY_SIZE
    for token in (EOS, *(f"<|{role}|>" for role in ROLES)):
        assert tokenizer.encode(token, add_special_tokens=False).ids == [token_id(tokenizer, token)]
    with pytest.raises(KeyError):
        token_id(tokenizer, "<|nobody|>")


def safetensors_header(path: Path) -> dict[str, dict[str, object]]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, dict[str, object]] = json.loads(file.read(length))
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


@pytest.mark.parametrize("size", SIZES)
def test_a_shipped_model_has_its_size_in_bfloat16(size: str) -> None:
    tensors = safetensors_header(MODELS / f"millrace-{size}" / "model.safetensors")
    parameters = 0
    for tensor in tensors.values():
        assert tensor["dtype"] == "BF16"
        shape = tensor["shape"]
        assert isinstance(shape, list)
        parameters += shape[0] * (shape[1] if len(shape) == 2 else 1)
    assert 0.8 < parameters / 1e6 / SIZES[size] < 1.2


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
