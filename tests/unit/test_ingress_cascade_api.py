"""Requests to cascades and their responses: parsing, tokenising per tokenizer, fields of bodies and streams."""

import json
from pathlib import Path
from typing import Any

import pytest
from millrace.contracts.observers import CascadeAttempt

from services.ingress.api.cascade_requests import build_any_call
from services.ingress.api.errors import ApiError
from services.ingress.api.models import ModelRegistry, ServedModel, Serving
from services.ingress.api.parsed_requests import Caller, ParsedRequest, distinct, parse_chat_request
from services.ingress.api.parsed_requests import parse_completion_request as parse_completion
from services.ingress.api.streams import CompletionStream, ResponseHead
from services.ingress.api.tokenizer import ModelTokenizer
from services.ingress.calls.messages import Call, CascadeReport, ChoiceDelta, Usage
from tests.live.ingress_rig import TEMPLATE, TOOL_TEMPLATE, write_model_folder

REPORT = CascadeReport(
    name="auto",
    tier=1,
    model="large",
    score=91.239,
    reason="score",
    attempts=[
        CascadeAttempt(request="r~1", tier=0, model="small", outcome="rejected", score=12.0, threshold=70.0),
        CascadeAttempt(request="r~2", tier=1, model="large", outcome="delivered", score=91.239, threshold=70.0),
    ],
    usages=[Usage(3, 5), Usage(4, 2)],
)


@pytest.fixture
def models(tmp_path: Path) -> ModelRegistry:
    """``small`` and ``twin`` share a tokenizer, ``large`` has another template; ``auto`` is a cascade of all three."""
    folders = {"small": (TEMPLATE, 64), "twin": (TEMPLATE, 2048), "large": (TOOL_TEMPLATE, 2048)}
    served = {
        name: ServedModel(
            name=name,
            tokenizer=ModelTokenizer.load(write_model_folder(tmp_path / name, template, length)),
            max_model_len=length,
        )
        for name, (template, length) in folders.items()
    }
    live = {"small": Serving(1), "twin": Serving(0, 0, wanted=False), "large": Serving(0)}
    return ModelRegistry(served, live.__getitem__, lambda: {"auto": ["small", "twin", "large", "elsewhere"]})


def chat(models: ModelRegistry, **fields: Any) -> ParsedRequest:
    body = {"model": "auto", "messages": [{"role": "user", "content": "hi"}]} | fields
    return parse_chat_request(json.dumps(body).encode(), models)


def call_of(models: ModelRegistry, parsed: ParsedRequest) -> Call:
    prompts = [
        [each.model.tokenizer.encode(text, special=each.special) for text in each.texts or []]
        for each in parsed.variants
    ]
    return build_any_call(parsed, prompts, Caller(request="r"), models.limit)


def test_a_cascades_call_has_the_request_for_each_model_with_the_models_own_bounds(models: ModelRegistry):
    parsed = chat(models, cascade={"quality": 80, "max_tier": 1, "entry_tier": 1, "stream": "early_commit"})
    assert [each.model.name for each in distinct(parsed)] == ["twin", "large"]
    call = call_of(models, parsed)
    assert call.model == "auto"
    assert [member.model for member in call.members] == ["small", "twin", "large"]
    rest = [member.sampling.max_tokens + len(member.prompts[0]) for member in call.members]
    assert rest == [64, 2048, 2048]
    options = call.cascade
    assert (options.quality, options.max_tier, options.entry_tier, options.early_commit) == (80.0, 1, 1, True)
    assert call.members[0].judged_prompt.endswith("<|assistant|>")


def test_models_that_cannot_take_the_request_are_left_out(models: ModelRegistry):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    call = call_of(models, chat(models, tools=[tool], tool_choice="required"))
    assert [member.model for member in call.members] == ["large"]
    long = call_of(models, chat(models, messages=[{"role": "user", "content": "x" * 100}]))
    assert [member.model for member in long.members] == ["twin", "large"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"cascade": {"quality": "high"}}, "cascade.quality"),
        ({"cascade": {"quality": 101}}, "cascade.quality"),
        ({"cascade": {"max_tier": 1.5}}, "cascade.max_tier"),
        ({"cascade": {"entry_tier": -1}}, "cascade.entry_tier"),
        ({"cascade": {"entry_tier": 2, "max_tier": 1}}, "cascade.entry_tier"),
        ({"cascade": {"stream": "now"}}, "cascade.stream"),
        ({"cascade": {"tier": 1}}, "cascade.tier"),
        ({"cascade": {"quality": True}}, "cascade.quality"),
        ({"cascade": {"entry_tier": "0"}}, "cascade.entry_tier"),
        ({"cascade": {"stream": 1}}, "cascade.stream"),
        ({"cascade": True}, "cascade"),
        ({"cascade": {}, "model": "small"}, "cascade"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, "messages"),
    ],
)
def test_what_cannot_be_served_is_a_400_that_names_the_field(models: ModelRegistry, fields: dict, param: str):
    with pytest.raises(ApiError) as caught:
        call_of(models, chat(models, **fields))
    assert (caught.value.status, caught.value.param) == (400, param)


def test_token_ids_need_one_tokenizer(models: ModelRegistry):
    body = {"model": "auto", "prompt": [1, 2, 3]}
    with pytest.raises(ApiError) as caught:
        parse_completion(json.dumps(body).encode(), models)
    assert caught.value.param == "prompt"


def test_models_lists_the_cascade_after_its_members_and_readiness_skips_what_the_plan_leaves_empty(
    models: ModelRegistry,
):
    cards = json.loads(models.list_body())["data"]
    assert [card["id"] for card in cards] == ["small", "twin", "large", "auto"]
    assert cards[-1]["cascade"] == ["small", "twin", "large"]
    assert cards[-1]["max_model_len"] == 2048
    assert models.card_of("auto") == cards[-1]
    assert list(models.waiting_for()) == ["large"]


@pytest.mark.parametrize("include_usage", [False, True])
def test_the_last_chunks_of_a_stream_say_what_the_cascade_did(include_usage: bool):
    """Of completions; chats, and whole answers: tests/live/test_ingress_cascade.py."""
    head = ResponseHead("x-r", 1, "large", 1)
    stream = CompletionStream(head, include_usage=include_usage, continuous=False, echo=[])
    before = stream.opening() + stream.deltas([ChoiceDelta(0, "ye", 1)], Usage(4, 1))
    assert b"cascade" not in before
    stream.tell(REPORT)
    after = stream.deltas([ChoiceDelta(0, "s", 1, "stop")], Usage(4, 2)) + stream.closing(Usage(4, 2))
    events = [json.loads(line[6:]) for line in after.decode().split("\n\n") if line.startswith("data: {")]
    assert all(event["cascade"]["score"] == 91.24 for event in events)
    assert events[-1]["model"] == "large"
    if include_usage:
        assert [a["total_tokens"] for a in events[-1]["usage"]["cascade"]["attempts"]] == [8, 6]
