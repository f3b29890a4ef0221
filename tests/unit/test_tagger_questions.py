"""Questions of ingress to a tagger about a call, and which calls are the same to it."""

from __future__ import annotations

import pytest
from millrace.contracts.worker import Sampling, StructuredOutput

from services.ingress.calls.messages import Call, CallKind
from services.ingress.dispatch.tag_client import PROMPT_HEAD_MAX, tag_request


def _call(prompt: tuple[int, ...] = (1, 2, 3), **fields) -> Call:
    names = {"n", "stop", "key", "prompt_head", "include_stop", "request", "stream"}
    sampling = {name: value for name, value in fields.items() if name not in names}
    rest = {name: value for name, value in fields.items() if name in names}
    given = {"request": "r", "kind": CallKind.CHAT, "model": "m", "prompts": [list(prompt)]} | rest
    return Call(**given, sampling=Sampling(**({"max_tokens": 100} | sampling)))


def _repeat_key(**fields) -> str:
    return tag_request(_call(**fields), 3).repeat_key


def test_a_question_says_what_may_tell_the_length() -> None:
    call = _call(
        key="team",
        n=2,
        stop=["\n", "END"],
        stop_token_ids=[9],
        min_tokens=5,
        seed=3,
        presence_penalty=0.5,
        repetition_penalty=1.25,
        structured=StructuredOutput(regex="[0-9]+"),
        prompt_head="p" * 5000,
    )
    asked = tag_request(call, 3)
    assert (asked.key, asked.n, asked.prompts, asked.stops, asked.min_tokens) == ("team", 2, 1, 3, 5)
    assert (asked.seeded, asked.penalties, asked.structured) == (True, 0.75, "regex")
    assert len(asked.prompt) == PROMPT_HEAD_MAX


@pytest.mark.parametrize(
    "fields", [{"max_tokens": 7}, {"logprobs": 3}, {"request": "other"}, {"key": "other"}, {"stream": True}]
)
def test_calls_that_differ_in_nothing_that_matters_have_one_repeat_key(fields: dict) -> None:
    assert _repeat_key(**fields) == _repeat_key()


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": (1, 2, 4)},
        {"prompt": (1, 2)},
        {"temperature": 0.0},
        {"seed": 1},
        {"top_p": 0.5},
        {"stop": ["x"]},
        {"min_tokens": 4},
        {"stop_token_ids": [4]},
        {"logit_bias": {5: -100.0}},
        {"structured": StructuredOutput(json_object=True)},
    ],
)
def test_calls_whose_lengths_may_differ_have_repeat_keys_of_their_own(fields: dict) -> None:
    assert _repeat_key(**fields) != _repeat_key()
