"""The Responses API: requests as chats, items and events from an output, each as OpenAI's own types read it."""

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from services.ingress.api.decoding import decode_body
from services.ingress.api.dialects import error_body
from services.ingress.api.errors import ApiError
from services.ingress.api.output_readers import JsonCallReader
from services.ingress.api.parsed_requests import Caller, ParsedRequest, build_call
from services.ingress.api.responses_api.parsing import parse_responses
from services.ingress.api.responses_api.requests import ResponsesRequest
from services.ingress.api.streams import EventStream, ResponseHead
from services.ingress.api.tools import ToolMode
from services.ingress.calls.messages import ChoiceDelta, DeltaLogprob, Usage
from tests.unit.test_ingress_api import registry

TEMPLATE = (
    "{% for t in tools or [] %}<tool>{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}"
    "{% endfor %}"
)
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
    + "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
USAGE = Usage(7, 5, 3, 2)
HEAD = ResponseHead("resp_0a-1", 5, "m", 1)
WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
}
PATCH = {"type": "custom", "name": "patch", "description": "Apply a patch"}
FILES = {
    "type": "namespace",
    "name": "files",
    "description": "",
    "tools": [{"type": "function", "name": "read", "parameters": {"type": "object"}}],
}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,aGk="}
FORM = {"type": "json_schema", "name": "s"}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def parsed(template: str = TEMPLATE, **fields: Any) -> ParsedRequest:
    request = decode_body(json.dumps({"model": "m", "input": "hi"} | fields).encode(), ResponsesRequest)
    return parse_responses(request, registry(template))


def prompt_of(items: Any, template: str = TEMPLATE, **fields: Any) -> str:
    texts = parsed(template, input=items, **fields).texts
    return texts[0]


def error_of(**fields: Any) -> dict[str, Any]:
    """The error object that a client gets."""
    with pytest.raises(ApiError) as caught:
        build_call(parsed(**fields), [[1, 2, 3]], Caller(request="r"), 100)
    assert caught.value.status == 400
    return dict(json.loads(error_body("/v1/responses", caught.value))["error"])


def stream_of(request: ParsedRequest) -> EventStream:
    return request.form.stream(HEAD)


def read(request: ParsedRequest, deltas: list[ChoiceDelta]) -> list[list[ChoiceDelta]]:
    """Deltas as OpenCalls has them read."""
    if request.tools.mode is ToolMode.NONE:
        return [[delta] for delta in deltas]
    told: list[list[ChoiceDelta]] = []
    reader = JsonCallReader(request.tools, 1)
    for delta in deltas:
        reader.read([delta], lambda each, _: told.append(each))
    return told


def events_of(data: bytes) -> list[dict[str, Any]]:
    """Events as sent; each is one of OpenAI's, named alike in both places."""
    events = []
    for block in data.decode().strip().split("\n\n"):
        name, body = block.split("\n")
        event = json.loads(body.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENT.validate_python(event)
        if "response" in event:
            Response.model_validate(event["response"])
        events.append(event)
    return events


def deltas_of(text: str, size: int, finish: str = "stop") -> list[ChoiceDelta]:
    parts = [text[i : i + size] for i in range(0, len(text), size)] or [""]
    return [ChoiceDelta(0, part, 1, finish if i == len(parts) - 1 else "") for i, part in enumerate(parts)]


def streamed(text: str, *, size: int = 1000, finish: str = "stop", **fields: Any) -> list[dict[str, Any]]:
    return told(parsed(stream=True, **fields), deltas_of(text, size, finish))


def told(request: ParsedRequest, deltas: list[ChoiceDelta]) -> list[dict[str, Any]]:
    stream = stream_of(request)
    out = stream.opening()
    for each in read(request, deltas):
        out += stream.deltas(each, USAGE)
    events = events_of(out + stream.closing(USAGE))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def whole(text: str, *, finish: str = "stop", **fields: Any) -> dict[str, Any]:
    request = parsed(**fields)
    body = request.form.collected(HEAD)
    for each in read(request, deltas_of(text, 4, finish)):
        body.deltas(each)
    answer: dict[str, Any] = json.loads(body.body(USAGE))
    Response.model_validate(answer)
    return answer


def types(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


# Requests.


def test_a_string_is_a_users_message_and_instructions_stand_first():
    assert prompt_of("hi", instructions="be brief") == "<system>be brief<user>hi"


def test_items_of_one_turn_are_one_message():
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "x", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
        {"type": "function_call", "id": "fc", "call_id": "1", "name": "weather", "arguments": '{"town":"Oslo"}'},
        {"type": "function_call", "id": "fd", "call_id": "2", "name": "read", "namespace": "files", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "18"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "none"}]},
        {"type": "message", "role": "assistant", "content": "18."},
        {"type": "message", "role": "assistant", "content": "Degrees."},
    ]  # fmt: skip
    assert prompt_of(items) == (
        '<user>weather?<assistant>I look.<tool_call>weather({"town": "Oslo"})<tool_call>files__read({})'
        "<tool>18<tool>none<assistant>18.<assistant>Degrees."
    )


def test_a_custom_tools_call_is_a_call_with_its_text():
    items = [
        {"role": "user", "content": "go"},
        {"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": "+a"},
        {"type": "custom_tool_call_output", "call_id": "1", "output": "done"},
    ]
    assert prompt_of(items) == '<user>go<assistant><tool_call>patch({"input": "+a"})<tool>done'


def test_arguments_that_were_cut_off_do_not_end_the_conversation():
    items = [
        {"role": "user", "content": "go"},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"town":'},
        {"type": "function_call_output", "call_id": "1", "output": "no valid JSON"},
    ]
    assert '<tool_call>weather({"arguments": "{\\"town\\":"})<tool>no valid JSON' in prompt_of(items)


def test_later_system_messages_go_first_where_the_template_wants_it():
    items = [
        {"role": "developer", "content": "b"},
        {"role": "user", "content": "hi"},
        {"role": "developer", "content": "c"},
    ]
    assert prompt_of(items, SYSTEM_FIRST, instructions="a") == "<system>a\n\nb\n\nc<user>hi"
    assert prompt_of(items, instructions="a") == "<system>a<system>b<user>hi<system>c"


def test_tools_are_functions_and_hosted_ones_are_left_out():
    request = parsed(tools=[WEATHER, PATCH, FILES, {"type": "web_search", "external_web_access": False}])
    assert request.texts == ["<tool>weather<tool>patch<tool>files__read<user>hi"]


def test_allowed_tools_are_the_only_ones():
    chosen = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "read"}]}
    request = parsed(tools=[WEATHER, FILES], tool_choice=chosen)
    assert request.texts == ["<tool>files__read<user>hi"]
    assert request.tools.mode == "required"


def test_a_named_tool_in_a_namespace_is_found():
    assert (
        parsed(tools=[WEATHER, FILES], tool_choice={"type": "function", "name": "read"}).tools.function == "files__read"
    )


def test_fields_are_those_of_a_chat():
    form = {"format": {"type": "json_schema", "name": "s", "schema": {"type": "object"}, "strict": True}}
    request = parsed(max_output_tokens=9, temperature=0.5, top_p=0.4, seed=3, text=form, top_logprobs=2, stop=["x"])
    call = build_call(request, [[1, 2, 3]], Caller(request="r"), 100)
    sampling = call.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.seed) == (9, 0.5, 0.4, 3)
    assert (sampling.logprobs, call.stop) == (2, ["x"])
    assert sampling.structured.json_schema == '{"type":"object"}'


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"input": []}, "input", "length"),
        ({"input": [{"role": "user"}]}, "input[0].content", "Missing"),
        ({"input": [{"content": "x"}]}, "input[0].role", "Missing"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id", "Missing"),
        ({"input": [{"type": "function_call", "call_id": "f"}]}, "input[0].name", "Missing"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "none of"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input", "This model takes no images"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "Missing"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "regex"),
        ({"tools": [{"type": "mcp"}]}, "tools[0].type", "none of"),
        ({"tools": [WEATHER | {"parameters": {"type": 3}}]}, "tools[0].parameters", "Schema"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name", "`x`"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "needs"),
        ({"tools": [WEATHER], "top_logprobs": 1}, "include", "tools"),
        ({"text": {"format": FORM}}, "text.format.schema", "missing"),
        ({"text": {"format": FORM | {"schema": {"type": 3}}}}, "text.format.schema", "Schema"),
        ({"max_output_tokens": 1000}, "max_output_tokens", "maximum context length"),
        ({"n": 2}, "n", "Unknown"),
    ],
)  # fmt: skip
def test_errors_name_the_parameter_of_this_api(fields: dict[str, Any], param: str, word: str):
    error = error_of(**fields)
    assert error["param"] == param
    assert word in error["message"]


# Answers.

MESSAGE_EVENTS = ["output_item.added", "content_part.added", "output_text.delta"]
MESSAGE_ENDS = ["output_text.done", "content_part.done", "output_item.done"]


def test_a_streamed_text_has_all_its_events_in_order():
    events = streamed("Hello, you", size=5)
    assert types(events) == [
        "created", "in_progress", *MESSAGE_EVENTS, "output_text.delta", *MESSAGE_ENDS, "completed",
    ]  # fmt: skip
    assert [event["delta"] for event in events if "delta" in event] == ["Hello", ", you"]
    assert events[0]["response"]["status"] == "in_progress"
    last = events[-1]["response"]
    assert last["output"] == [events[-2]["item"]]
    assert last["output"][0]["content"][0]["text"] == "Hello, you"
    assert last["usage"]["input_tokens_details"]["cached_tokens"] == 3
    assert (last["usage"]["output_tokens"], last["usage"]["total_tokens"]) == (5, 12)


def test_an_output_cut_by_its_bound_is_incomplete():
    events = streamed("Hel", finish="length")
    last = events[-1]
    assert (last["type"], last["response"]["incomplete_details"]) == (
        "response.incomplete", {"reason": "max_output_tokens"},
    )  # fmt: skip
    assert events[-2]["item"]["status"] == "incomplete"


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_text_and_calls_are_items_in_their_order(size: int):
    text = 'I look.\n<tool_call>\n{"name": "weather", "arguments": {"town": "Oslo"}}\n</tool_call>\n' + (
        '<tool_call>\n{"name": "files__read", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "patch", "arguments": {"input": "+a\\n"}}\n</tool_call>'
    )
    tools = [WEATHER, FILES, PATCH]
    events = streamed(text, size=size, tools=tools)
    message, weather, read, patch = events[-1]["response"]["output"]
    assert message["content"][0]["text"].strip() == "I look."
    assert (weather["type"], weather["name"], json.loads(weather["arguments"])) == (
        "function_call",
        "weather",
        {"town": "Oslo"},
    )
    assert (read["name"], read["namespace"], read["arguments"]) == ("read", "files", "{}")
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "patch", "+a\n")
    assert len({item["id"] for item in events[-1]["response"]["output"]}) == 4
    assert len({item["call_id"] for item in (weather, read, patch)}) == 3
    parts = "".join(
        e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta" and e["output_index"] == 1
    )
    assert parts == weather["arguments"]
    assert types(events).count("output_item.added") == types(events).count("output_item.done") == 4
    assert whole(text, tools=tools)["output"] == events[-1]["response"]["output"]


def test_blanks_before_a_call_are_no_message():
    events = streamed('\n\n<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>\n', tools=[WEATHER])
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["function_call"]
    assert streamed("\n \n")[-1]["response"]["output"][0]["content"][0]["text"] == "\n \n"


def test_a_forced_call_is_the_only_item():
    answer = whole('{"town": "Oslo"}', tools=[WEATHER], tool_choice={"type": "function", "name": "weather"})
    (item,) = answer["output"]
    assert (item["name"], item["arguments"], item["status"]) == ("weather", '{"town": "Oslo"}', "completed")


def test_logprobs_stand_in_deltas_and_in_the_part():
    entry = DeltaLogprob("a", -0.5, b"a", [("a", -0.5, b"a")])
    deltas = [ChoiceDelta(0, "", 1, "", None, [entry]), ChoiceDelta(0, "a", 1, "stop", None, [entry])]
    events = told(parsed(top_logprobs=1, include=["message.output_text.logprobs"]), deltas)
    assert [len(event["logprobs"]) for event in events if "delta" in event] == [1, 1]
    assert len(events[-1]["response"]["output"][0]["content"][0]["logprobs"]) == 2


def test_reasoning_is_an_item_that_comes_back():
    deltas = [ChoiceDelta(0, "", 1, reasoning="let "), ChoiceDelta(0, "18", 2, "stop", reasoning="me see")]
    events = told(parsed(include=["reasoning.encrypted_content"]), deltas)
    assert types(events)[2:9] == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
    ]  # fmt: skip
    answer = events[-1]["response"]
    reasoning, message = answer["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "let me see"}]
    assert message["content"][0]["text"] == "18"
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == 2
    template = "{% for m in messages %}<{{ m.role }}>[{{ m.reasoning }}]{{ m.content }}{% endfor %}"
    assert prompt_of([reasoning, message], template) == "<assistant>[let me see]18"
    assert prompt_of([reasoning], template) == "<assistant>[let me see]"  # cut by `max_output_tokens`
    # Codex sends it back without the text, another server's is not readable.
    assert prompt_of([reasoning | {"content": None}, message], template) == "<assistant>[let me see]18"
    assert (
        prompt_of([reasoning | {"content": None, "encrypted_content": "gAAA"}, message], template) == "<assistant>[]18"
    )


def test_effort_reaches_the_template():
    request = parsed("{{ reasoning_effort }}", reasoning={"effort": "low", "summary": "auto"})
    assert request.texts == ["low"]


def test_the_response_repeats_what_was_asked():
    answer = whole(
        "x", instructions="be brief", tools=[WEATHER], tool_choice="auto", metadata={"a": "b"}, temperature=0.5
    )
    assert (answer["instructions"], answer["metadata"], answer["temperature"]) == ("be brief", {"a": "b"}, 0.5)
    assert answer["tools"] == [WEATHER | {"strict": None}]
    assert (answer["id"], answer["object"], answer["created_at"], answer["store"]) == ("resp_0a-1", "response", 5, True)
