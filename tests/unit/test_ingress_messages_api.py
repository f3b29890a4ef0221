"""The Messages API: requests as chats, blocks and events from an output, each as Anthropic's own types read it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from services.ingress.api.dialects import error_body
from services.ingress.api.errors import ApiError
from services.ingress.api.messages_api.parsing import parse_messages_request
from services.ingress.api.parsed_requests import Caller, ParsedRequest, build_call
from services.ingress.api.streams import EventStream, ResponseHead, StreamBody
from services.ingress.calls.messages import ChoiceDelta, Usage
from tests.unit.test_ingress_api import registry, seeing
from tests.unit.test_ingress_cascade_api import REPORT
from tests.unit.test_ingress_responses_api import SYSTEM_FIRST, TEMPLATE, deltas_of, read

HI: Any = [{"role": "user", "content": "hi"}]
IMAGE: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
RESULT: Any = {"type": "tool_result", "tool_use_id": "1"}
WEATHER: Any = {"name": "weather", "input_schema": {"type": "object", "properties": {"town": {"type": "string"}}}}
READ: Any = {"name": "read", "type": "custom", "description": "Read", "input_schema": {}}
CALLS = (
    'I look.\n<tool_call>\n{"name": "weather", "arguments": {"town": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "read", "arguments": {}}\n</tool_call>'
)
BAD_FORM = {"type": "json_schema", "schema": {"type": 3}}
USAGE = Usage(7, 5, 3)
HEAD = ResponseHead("msg_0a-1", 5, "m", 1, 7)
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def parsed(template: str = TEMPLATE, **fields: Any) -> ParsedRequest:
    body = {"model": "m", "messages": HI, "max_tokens": 20} | fields
    return parse_messages_request(json.dumps(body).encode(), registry(template))


def prompt_of(messages: Any, template: str = TEMPLATE, **fields: Any) -> str:
    texts = parsed(template, messages=messages, **fields).texts
    return texts[0]


def error_of(**fields: Any) -> dict[str, Any]:
    """The error object that a client gets."""
    with pytest.raises(ApiError) as caught:
        build_call(parsed(**fields), [[1, 2, 3]], Caller(request="r"), 100)
    assert caught.value.status == 400
    answer: dict[str, Any] = json.loads(error_body("/v1/messages", caught.value))
    assert answer["type"] == "error"
    return dict(answer["error"])


def stream_of(request: ParsedRequest) -> EventStream:
    return request.form.stream(HEAD)


def events_of(data: bytes) -> list[dict[str, Any]]:
    """Events as sent; each but pings and errors is one of Anthropic's, named alike in both places."""
    events = []
    for block in data.decode().strip().split("\n\n"):
        name, body = block.split("\n")
        event = json.loads(body.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] not in ("ping", "error"):
            EVENT.validate_python(event)
        events.append(event)
    return events


def told(request: ParsedRequest, deltas: list[ChoiceDelta]) -> list[dict[str, Any]]:
    stream = stream_of(request)
    out = stream.opening()
    for each in read(request, deltas):
        out += stream.deltas(each, USAGE)
    return events_of(out + stream.closing(USAGE))


def streamed(text: str, *, size: int = 1000, finish: str = "stop", **fields: Any) -> list[dict[str, Any]]:
    return told(parsed(stream=True, **fields), deltas_of(text, size, finish))


def whole(deltas: list[ChoiceDelta], **fields: Any) -> dict[str, Any]:
    request = parsed(**fields)
    body = request.form.collected(HEAD)
    for each in read(request, deltas):
        body.deltas(each)
    answer: dict[str, Any] = json.loads(body.body(USAGE))
    Message.model_validate(answer)
    return answer


def blocks_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Blocks as a client puts them together."""
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            delta = dict(event["delta"])
            delta.pop("type")
            for field, text in delta.items():
                name = "json" if field == "partial_json" else field
                blocks[-1][name] += text
    for block in blocks:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text or "{}")
    return blocks


def types(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in events]


# Requests.


def test_the_system_stands_first_without_what_differs_each_time():
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=7"},
        {"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}},
    ]
    assert prompt_of(HI, system=system) == prompt_of(HI, system="be brief") == "<system>be brief<user>hi"


def test_system_messages_between_others_go_first_where_the_template_wants_it():
    messages = [*HI, {"role": "system", "content": "there are agents"}]
    assert prompt_of(messages, SYSTEM_FIRST, system="a") == "<system>a\n\nthere are agents<user>hi"
    assert prompt_of(messages, system="a") == "<system>a<user>hi<system>there are agents"


def test_thinking_calls_and_results_are_those_of_a_chat():
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.reasoning or '' }}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.arguments | tojson }}]{% endfor %}{% endfor %}"
    )
    messages = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm ", "signature": "s"}, {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "1", "name": "weather", "input": {"town": "Oslo"}},
        ]},
        {"role": "user", "content": [
            {"type": "text", "text": "go on"},
            {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "18"}], "is_error": False},
        ]},
    ]  # fmt: skip
    assert prompt_of(messages, template, tools=None) == (
        '<user>weather?<assistant>hm I look.[1 {"town": "Oslo"}]<tool>18<user>go on'
    )


def test_images_of_a_result_follow_it_in_a_message_of_the_user():
    """As vLLM has it: few templates show images in a message of a tool."""
    parts = [{"type": "text", "text": "a"}, IMAGE, {"type": "text", "text": "b"}, IMAGE]
    results = [{"type": "tool_result", "tool_use_id": str(i), "content": parts[i:]} for i in (0, 3)]
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": [*results, *parts[:1]]}]}
    request = parse_messages_request(json.dumps(body).encode(), seeing("<{{ m.role }}>"))
    assert request.texts == ["<tool>a\nb<user><i><i><tool><user><i><user>a"]
    assert request.image_files == [b"hi"] * 3


def test_a_message_of_the_assistant_at_the_end_is_gone_on_with():
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
        "{% if add_generation_prompt %}<a>{% endif %}"
    )
    assert prompt_of([*HI, {"role": "assistant", "content": "Hello, "}], template) == "<user>hi</><assistant>Hello,"
    assert prompt_of(HI, template) == "<user>hi</><a>"


def test_tools_are_functions_and_anthropics_own_are_left_out():
    hosted = {"type": "web_search_20250305", "name": "web_search", "max_uses": 2}
    assert parsed(tools=[WEATHER, READ, hosted]).texts == ["<tool>weather<tool>read<user>hi"]


@pytest.mark.parametrize(
    ("choice", "mode"), [({"type": "any"}, "required"), ({"type": "none"}, "none"), ({"type": "auto"}, "tagged")]
)
def test_choices_of_tools(choice: dict[str, Any], mode: str):
    assert parsed(tools=[WEATHER], tool_choice=choice).tools.mode == mode
    single = parsed(tools=[WEATHER], tool_choice={"type": "auto", "disable_parallel_tool_use": True}).tools.single
    assert single
    named = parsed(tools=[WEATHER, READ], tool_choice={"type": "tool", "name": "read"}).tools
    assert (named.mode, named.function) == ("named", "read")


def test_fields_are_those_of_a_chat():
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    request = parsed(temperature=0.5, top_p=0.4, top_k=3, stop_sequences=["x"], output_config=form)
    call = build_call(request, [[1, 2, 3]], Caller(request="r"), 100)
    sampling = call.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (20, 0.5, 0.4, 3)
    assert call.stop == ["x"]
    assert sampling.structured.json_schema == '{"type":"object"}'


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({"thinking": {"type": "disabled"}}, "none"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}, "high"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, ""),
    ],
)
def test_effort_reaches_the_template(fields: dict[str, Any], effort: str):
    assert parsed("x{{ reasoning_effort }}", **fields).texts == [f"x{effort}"]


def test_what_claude_code_sends_besides_is_taken():
    parsed(
        metadata={"user_id": "{}"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        cache_control={"type": "ephemeral"},
        service_tier="auto",
        mcp_servers=[],
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "`max_tokens`"),
        ({"max_tokens": 1000}, "maximum context length"),
        ({"messages": []}, "`messages`"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "This model takes no images"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "'document' is none of 'image', "),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "content[0].tool_use_id`"),
        ({"messages": [{"role": "user", "content": [RESULT | {"content": [{"type": "text"}]}]}]}, "text`"),
        ({"messages": [{"role": "user", "content": [RESULT | {"content": [{"type": "document"}]}]}]}, "of 'image',"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1"}]}]}, "content[0].name`"),
        ({"tools": [{"name": "a b"}]}, "`tools[0].name`"),
        ({"tools": [WEATHER | {"input_schema": {"type": 3}}]}, "`tools[0].input_schema`"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "has no function `x`"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "`tool_choice.name`"),
        ({"output_config": {"format": BAD_FORM}}, "`output_config.format.schema`"),
        ({"mcp_servers": [{"url": "x"}]}, "`mcp_servers` is not supported"),
        ({"n": 2}, "Unknown parameter: `n`"),
    ],
)  # fmt: skip
def test_errors_name_the_parameter_of_this_api(fields: dict[str, Any], words: str):
    error = error_of(**fields)
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]


@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, "authentication_error"), (404, "not_found_error"), (429, "rate_limit_error"), (503, "overloaded_error"),
     (500, "api_error")],
)  # fmt: skip
def test_errors_have_anthropics_types(status: int, kind: str):
    error = json.loads(error_body("/v1/messages/count_tokens", ApiError(status, "no")))
    assert error == {"type": "error", "error": {"type": kind, "message": "no"}}


# Answers.


def test_a_streamed_text_has_all_its_events_in_order():
    events = streamed("Hello, you", size=5)
    assert types(events) == [
        "message_start", "ping", "content_block_start", "content_block_delta", "content_block_delta",
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    start = events[0]["message"]
    assert (start["usage"]["input_tokens"], start["stop_reason"], start["content"]) == (7, None, [])
    assert blocks_of(events) == [{"type": "text", "text": "Hello, you"}]
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    usage = {"input_tokens": 4, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 3, "output_tokens": 5}
    assert events[-2]["usage"] == usage


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_text_and_calls_are_blocks_in_their_order(size: int):
    events = streamed(CALLS, size=size, tools=[WEATHER, READ])
    text, weather, read_call = blocks_of(events)
    assert text["text"].strip() == "I look."
    assert (weather["name"], weather["input"]) == ("weather", {"town": "Oslo"})
    assert (read_call["name"], read_call["input"]) == ("read", {})
    assert weather["id"] != read_call["id"]
    assert types(events).count("content_block_start") == types(events).count("content_block_stop") == 3
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    answer = whole(deltas_of(CALLS, size), tools=[WEATHER, READ])
    assert (answer["content"], answer["stop_reason"]) == ([text, weather, read_call], "tool_use")


def test_blanks_before_a_call_are_no_text():
    call = '\n\n<tool_call>\n{"name": "read", "arguments": {}}\n</tool_call>\n'
    assert [block["type"] for block in blocks_of(streamed(call, tools=[READ]))] == ["tool_use"]
    assert blocks_of(streamed("\n \n")) == [{"type": "text", "text": "\n \n"}]


def test_an_empty_answer_has_one_empty_block():
    assert blocks_of(streamed("")) == [{"type": "text", "text": ""}]
    assert whole([ChoiceDelta(0, "", 1, "stop")])["content"] == [{"type": "text", "text": ""}]


def test_reasoning_is_a_block_with_a_signature():
    deltas = [ChoiceDelta(0, "", 1, reasoning="let "), ChoiceDelta(0, "18", 2, "stop", reasoning="me see")]
    thinking, text = blocks_of(told(parsed(), deltas))
    assert (thinking["type"], thinking["thinking"], text["text"]) == ("thinking", "let me see", "18")
    assert thinking["signature"]
    assert whole(deltas)["content"] == [thinking, text]


@pytest.mark.parametrize(
    ("text", "finish", "stopped_by", "reason"),
    [
        ("Hel", "length", None, ("max_tokens", None)),
        ("Hel", "stop", "x", ("stop_sequence", "x")),
        ("Hel", "stop", 7, ("end_turn", None)),
        (CALLS, "stop", "x", ("tool_use", None)),
        ('<tool_call>\n{"name": "weather", "arguments": {"tow', "stop", "x", ("stop_sequence", "x")),
        ('<tool_call>\n{"name": "weather", "arguments": {"tow', "length", None, ("max_tokens", None)),
    ],
)
def test_reasons_of_the_end(text: str, finish: str, stopped_by: str | int | None, reason: tuple[str, str | None]):
    deltas = [ChoiceDelta(0, text, 1, finish, stopped_by)]
    answer = whole(deltas, tools=[WEATHER, READ])
    assert (answer["stop_reason"], answer["stop_sequence"]) == reason
    assert told(parsed(tools=[WEATHER, READ]), deltas)[-2]["delta"] == {
        "stop_reason": reason[0],
        "stop_sequence": reason[1],
    }


@pytest.mark.parametrize("report", [None, REPORT])
def test_a_whole_message_tells_of_a_cascade(report: Any):
    whole = StreamBody(stream_of(parsed()))
    whole.deltas([ChoiceDelta(0, "Hello", 2, finish_reason="stop")])
    body = json.loads(whole.body(USAGE, report))
    assert body["content"] == [{"type": "text", "text": "Hello"}]
    assert body.get("cascade", {}).get("model") == (report and "large")
