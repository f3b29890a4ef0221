"""Questions of ingress to a tagger about a call."""

from millrace.contracts.worker import Sampling, StructuredOutput

from services.ingress.calls.messages import Call, CallKind
from services.ingress.dispatch.tag_client import PROMPT_HEAD_MAX, tag_request


def _call(prompt: tuple[int, ...] = (1, 2, 3), **fields) -> Call:
    names = {"n", "stop", "key", "prompt_head", "include_stop", "request", "stream"}
    sampling = {name: value for name, value in fields.items() if name not in names}
    rest = {name: value for name, value in fields.items() if name in names}
    given = {"request": "r", "kind": CallKind.CHAT, "model": "m", "prompts": [list(prompt)]} | rest
    return Call(**given, sampling=Sampling(**({"max_tokens": 100} | sampling)))


def test_a_question_says_what_may_tell_the_length() -> None:
    call = _call(
        key="team",
        n=2,
        stop=["\n", "END"],
        stop_token_ids=[9],
        min_tokens=5,
        presence_penalty=0.5,
        repetition_penalty=1.25,
        structured=StructuredOutput(regex="[0-9]+"),
        prompt_head="p" * 5000,
    )
    asked = tag_request(call, 3)
    assert (asked.key, asked.n, asked.prompts, asked.stops, asked.min_tokens) == ("team", 2, 1, 3, 5)
    assert (asked.penalties, asked.structured) == (0.75, "regex")
    assert len(asked.prompt) == PROMPT_HEAD_MAX
