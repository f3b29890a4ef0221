"""Reading prompts, features and history: bounded, finite, and about what they should be."""

import math
import re

import pytest
from millrace.contracts.tagger import TagRequest
from millrace.lengths.features import FEATURES, extract
from millrace.lengths.history import LengthHistory, RunningMeans
from millrace.lengths.prompttext import DIGITS_MAX, WORDS_MAX, read_prompt


def _request(**fields) -> TagRequest:
    return TagRequest(**({"request": "r", "model": "m", "prompt_tokens": 12, "max_tokens": 500} | fields))


def _features(prompt: str, history: LengthHistory | None = None, **fields) -> dict[str, float]:
    request = _request(prompt=prompt, **fields)
    return dict(zip(FEATURES, extract(request, read_prompt(prompt), history or LengthHistory()), strict=True))


@pytest.mark.parametrize(
    "head",
    [
        "<|bos|><|system|>Be brief.<|eos|><|user|>Count from 3 to 90.<|eos|><|assistant|>",
        "<s>[INST] Count from 3 to 90. [/INST]",
        "<|start_header_id|>user<|end_header_id|>\n\nCount from 3 to 90.<|eot_id|><|start_header_id|>assistant",
        "Count from 3 to 90.",
    ],
)
def test_the_last_turn_is_what_the_user_said_in_every_template(head: str) -> None:
    text = read_prompt(head)
    assert text.turn == "Count from 3 to 90."
    assert text.numbers == [3, 90]


def test_prompts_of_one_template_share_its_hash_and_others_do_not() -> None:
    one, other = read_prompt("Count from 3 to 90."), read_prompt("Count from 17 to 18.")
    assert one.template == other.template
    assert one.opening == other.opening
    assert read_prompt("Count down from 9 to 3.").template != one.template


@pytest.mark.parametrize("text", ["", "3", "a1b22 333\n4,5", "٣ ³ ½ 7", "x\ud8009y", "0" * 9 + " 12", "é1ü2\x0b3\x1c4"])
def test_numbers_are_runs_of_plain_digits_whatever_is_between_them(text: str) -> None:
    runs = re.findall("[0-9]+", text)

    found = read_prompt(text)

    assert found.digits == sum(map(len, runs))
    assert found.numbers == [int(run) for run in runs if len(run) <= DIGITS_MAX]


@pytest.mark.parametrize("prompt", ["", " ", "\n" * 2048, "9" * 2048, "\ud800", "<|user|>" * 200, "a " * 1024, "١٢٣"])
def test_any_text_has_finite_features(prompt: str) -> None:
    assert all(map(math.isfinite, _features(prompt).values()))


def test_a_long_prompt_is_looked_at_only_as_far_as_time_allows() -> None:
    assert len(read_prompt("word " * 5000).words) == WORDS_MAX


def test_history_of_key_and_template_are_features_of_the_next_request() -> None:
    history = LengthHistory()
    text = read_prompt("Count from 3 to 90.")
    for length in (10, 20):
        history.learn(key="team", opening=text.opening, template=text.template, length=length)
    found = _features("Count from 1 to 2.", history, key="team")
    assert (found["template_mean"], found["template_last"], found["template_count"]) == (15, 20, 2)
    assert (found["key_mean"], found["key_count"], found["model_mean"]) == (15, 2, 15)
    assert _features("Count from 1 to 2.", history, key="other")["key_count"] == 0


def test_running_means_forget_what_was_longest_unseen() -> None:
    means = RunningMeans(entries_max=2)
    for key in ("a", "b", "a", "c"):
        means.add(key, 1.0)
    assert [means.get(key) is None for key in ("a", "b", "c")] == [False, True, False]
    assert len(means) == 2
