"""Request bodies to calls: defaults as vLLM has them, prompts as templates write them, limits as they are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from millrace.cluster.model_folders import context_length_of
from millrace.contracts.worker import Sampling, StructuredOutput
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from services.ingress.api.errors import REFUSALS, ApiError, refusal
from services.ingress.api.images import images_of
from services.ingress.api.logprobs import CompletionLogprobs
from services.ingress.api.models import LENGTH_UNKNOWN, ModelRegistry, ServedModel, Serving
from services.ingress.api.openapi import openapi_document
from services.ingress.api.parsed_requests import (
    PROMPTS_MAX,
    Caller,
    build_call,
    parse_batch_request,
    parse_chat_request,
    parse_completion_request,
)
from services.ingress.api.requests import ChatRequest, CompletionRequest
from services.ingress.api.responses import ChatResponse, CompletionResponse
from services.ingress.api.streams import ChatStream, CompletionStream, EchoedPrompt, ResponseHead
from services.ingress.api.tokenize_endpoints import detokenize, tokenize
from services.ingress.api.tokenizer import ChatTemplate, ModelTokenizer, TemplateRefused
from services.ingress.api.tools import NO_TOOLS, ToolMode, ToolPlan
from services.ingress.api.unsupported import UNSUPPORTED
from services.ingress.calls.messages import Call, CallPart, ChoiceDelta, DeltaLogprob, RefusalKind, Usage

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
LENGTH = 500
ALIVE = Serving(1, 0)


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<eos>", special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))]
    )
    return tokenizer


def registry(template: str | None = TEMPLATE, live: Serving = ALIVE) -> ModelRegistry:
    special = {"bos_token": "<bos>", "eos_token": "<eos>"}
    chat = None if template is None else ChatTemplate(template, special)
    tokenizer = ModelTokenizer(byte_tokenizer(), chat, max_model_len=LENGTH)
    model = ServedModel(name="m", tokenizer=tokenizer, max_model_len=LENGTH)
    return ModelRegistry({"m": model}, lambda name: live)


def call_of(body: dict[str, Any], models: ModelRegistry | None = None) -> Call:
    models = models or registry()
    make = parse_chat_request if "messages" in body else parse_completion_request
    parsed = make(json.dumps({"model": "m"} | body).encode(), models)
    encode = parsed.model.tokenizer.encode
    prompts = parsed.token_ids or [encode(text, special=parsed.special) for text in parsed.texts or []]
    return build_call(parsed, prompts, Caller(request="r"), models.limit(parsed.model))


def prompt_of(messages: list[Any], template: str = TEMPLATE, **fields: Any) -> str:
    models = registry(template)
    return models.get("m").tokenizer.decode(call_of({"messages": messages} | fields, models).prompts[0])


def error_of(body: dict[str, Any], models: ModelRegistry | None = None) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call_of(body, models)
    return caught.value


USER = [{"role": "user", "content": "hi"}]
USER_PROMPT = "<bos><user>hi<eos><assistant>"


def test_a_bare_chat_request_has_vllms_defaults_and_the_rest_of_the_models_length():
    call = call_of({"messages": USER})
    assert call.sampling == Sampling(max_tokens=LENGTH - len(call.prompts[0]))
    assert (call.n, call.stop, call.stream, call.skip_special_tokens) == (1, [], False, True)
    assert call.prompt_head == USER_PROMPT


def test_a_bare_completion_has_sixteen_tokens_and_a_bos():
    call = call_of({"prompt": "hi"})
    assert call.sampling == Sampling(max_tokens=16)
    assert len(call.prompts[0]) == 3
    assert len(call_of({"prompt": "hi", "add_special_tokens": False}).prompts[0]) == 2


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 3}, "top_k", 3),
        ({"temperature": 0}, "temperature", 0.0),
        ({"logit_bias": {"7": -100}}, "logit_bias", {7: -100.0}),
        ({"logprobs": True}, "logprobs", 0),
        ({"logprobs": True, "top_logprobs": 5}, "logprobs", 5),
        ({"logprobs": False}, "logprobs", None),
        ({"max_completion_tokens": 9}, "max_tokens", 9),
        ({"max_tokens": 9, "max_completion_tokens": 9}, "max_tokens", 9),
        ({"stop_token_ids": [4, 5]}, "stop_token_ids", [4, 5]),
        ({"response_format": {"type": "text"}}, "structured", None),
        ({"response_format": {"type": "json_object"}}, "structured", StructuredOutput(json_object=True)),
        ({"structured_outputs": {"regex": "a+"}}, "structured", StructuredOutput(regex="a+")),
        ({"structured_outputs": {"choice": ["a"]}}, "structured", StructuredOutput(choice=["a"])),
        ({"structured_outputs": {"json": '{"a":1}'}}, "structured", StructuredOutput(json_schema='{"a":1}')),
    ],
)  # fmt: skip
def test_fields_arrive_in_sampling(given: dict[str, Any], field: str, value: Any):
    assert getattr(call_of({"messages": USER} | given).sampling, field) == value


@pytest.mark.parametrize(("stop", "stops"), [("a", ["a"]), (["a", "b"], ["a", "b"]), (None, []), ([], [])])
def test_stop_is_a_string_or_some(stop: Any, stops: list[str]):
    assert call_of({"messages": USER, "stop": stop}).stop == stops


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        ({"properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "$ref": {"type": "string"}}}, None),
        ({"type": "array", "items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"type": "string"}}}, None),
        ({"enum": [{"$ref": "http://127.0.0.1:9/data"}]}, None),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "type": "object"}, None),
        ({"$schema": "http://127.0.0.1:9/own"}, "dialect"),
        ({"$schema": ["a"]}, "dialect"),
        ({"properties": {"a": {"minimum": "x"}}}, "properties/a/minimum"),
        ({"required": "a"}, "required"),
    ],
)
def test_schemas_are_checked_without_fetching_anything(schema: Any, fault: str | None):
    body = {
        "messages": USER,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    }
    if fault is None:
        assert json.loads(call_of(body).sampling.structured.json_schema) == schema
        return
    error = error_of(body)
    assert (error.param, error.code) == ("response_format.json_schema.schema", "invalid_json_schema")
    assert fault in error.message


def test_null_is_the_same_as_absent_for_every_optional_parameter():
    for kind, body in ((ChatRequest, {"messages": USER}), (CompletionRequest, {"prompt": "hi"})):
        names = {f.name for f in msgspec.structs.fields(kind)} | UNSUPPORTED.keys()
        names -= {"model", "messages", "prompt"}
        assert call_of(body | dict.fromkeys(names)) == call_of(body)


def test_every_unsupported_parameter_is_refused_by_name():
    for kind, body in ((ChatRequest, {"messages": USER}), (CompletionRequest, {"prompt": "hi"})):
        for name in UNSUPPORTED.keys() - set(kind.__struct_fields__):
            error = error_of(body | {name: "something"})
            assert (error.status, error.param, error.code) == (400, name, "unsupported_parameter")
            assert error.message.startswith(f"`{name}` is not supported: ")


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, slice(-3, None)),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, slice(-3, None)),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, slice(0, 3)),
        ({"truncate_prompt_tokens": 300}, slice(None)),
        ({"truncate_prompt_tokens": -1, "max_tokens": LENGTH - 4}, slice(-4, None)),
    ],
)
def test_a_prompt_is_cut_to_the_tokens_asked_for(fields: dict[str, Any], kept: slice):
    prompt = list(range(8))
    assert call_of({"prompt": prompt} | fields).prompts == [prompt[kept]]
    assert error_of({"prompt": prompt, "truncate_prompt_tokens": LENGTH}).param == "truncate_prompt_tokens"


def test_a_chat_takes_the_tokens_of_another_server():
    chat = {"messages": USER, "kv_transfer_params": {"prompt_token_ids": [5, 6]}}
    assert call_of(chat).prompts == [[5, 6]]
    other = {"messages": USER, "kv_transfer_params": {"do_remote_prefill": True}}
    assert error_of(other).param == "kv_transfer_params.do_remote_prefill"


def test_vllms_own_sampling_fields_reach_the_engine():
    body = {"prompt": "hi", "allowed_token_ids": [3, 4], "bad_words": ["ab"], "cache_salt": "s", "prompt_logprobs": 2}
    body |= {"thinking_token_budget": 9}
    sampling = call_of(body).sampling
    assert (sampling.allowed_token_ids, sampling.cache_salt, sampling.prompt_logprobs) == ([3, 4], "s", 2)
    assert sampling.thinking_token_budget == 9
    assert call_of({"prompt": "hi", "thinking_token_budget": -1}).sampling.thinking_token_budget is None
    encode = registry().get("m").tokenizer.encode
    assert sampling.bad_words == [encode("ab", special=False)]  # behind a blank it has one token more
    assert call_of({"prompt": "hi", "echo": True, "logprobs": 1}).sampling.prompt_logprobs == 1
    assert call_of({"prompt": "hi", "echo": True, "max_tokens": 0}).sampling.max_tokens == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": [9_999]}, "allowed_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"cache_salt": "a/b"}, "cache_salt"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"priority": 1}, "priority"),
    ],
)
def test_values_that_cannot_be_honoured_are_refused_by_name(fields: dict[str, Any], param: str):
    assert error_of({"prompt": "hi"} | fields).param == param


def test_token_ids_and_the_prompts_logprobs_are_told_whole_and_streamed():
    told = [
        None,
        {
            "7": {"logprob": -1.0, "rank": 2, "decoded_token": "y"},
            "8": {"logprob": -0.5, "rank": 1, "decoded_token": "z"},
        },
    ]
    entry = DeltaLogprob("b", -2.0, b"b", [("a", -0.1, b"a")])
    deltas = [
        ChoiceDelta(0, "b", 1, logprobs=[entry], token_ids=[5], prompt_logprobs=told),
        ChoiceDelta(0, "", 1, "stop", token_ids=[2]),
    ]
    head, echo = ResponseHead("c-1", 1, "m", 1, 2, [[6, 7]]), [EchoedPrompt("xy", "x")]
    whole = CompletionResponse(head, echo)
    whole.deltas(deltas)
    choice = json.loads(whole.body(Usage(2, 2)))["choices"][0]
    assert (choice["text"], choice["token_ids"], choice["prompt_token_ids"]) == ("xyb", [5, 2], [6, 7])
    assert choice["prompt_logprobs"] == told
    assert choice["logprobs"]["tokens"] == ["x", "y", "b"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.0]
    assert choice["logprobs"]["top_logprobs"] == [None, {"y": -1.0, "z": -0.5}, {"b": -2.0, "a": -0.1}]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    stream = CompletionStream(head, include_usage=False, continuous=False, echo=echo)
    events = [
        json.loads(event[6:])["choices"][0]
        for event in b"".join(stream.deltas([d], Usage(2, 1)) for d in deltas).split(b"\n\n")
        if event
    ]
    assert [event["token_ids"] for event in events] == [[5], [2]]
    assert [event.get("prompt_token_ids") for event in events] == [[6, 7], None]
    assert events[0]["logprobs"] == choice["logprobs"]


def test_a_chat_tells_the_prompts_ids_with_the_role_and_each_tokens_once():
    stream = ChatStream(ResponseHead("c-1", 1, "m", 1, 2, [[6, 7]]), include_usage=False, continuous=False)
    deltas = [
        ChoiceDelta(0, "b", 1, token_ids=[5]),
        ChoiceDelta(0, "", 1, token_ids=[9]),
        ChoiceDelta(0, "c", 1, "stop", token_ids=[2]),
    ]
    events = b"".join(stream.deltas([delta], Usage(2, 1)) for delta in deltas).split(b"\n\n")
    first, *rest = [json.loads(event[6:]) for event in events if event]
    assert first["prompt_token_ids"] == [6, 7]
    assert [event["choices"][0].get("token_ids") for event in rest] == [[5], [9], [2]]


def test_the_first_event_comes_with_the_first_token_as_vllms():
    head, nothing = ResponseHead("c-1", 1, "m", 1), [ChoiceDelta(0, "", 1)]
    chat = ChatStream(head, include_usage=False, continuous=False)
    completion = CompletionStream(head, include_usage=False, continuous=False, echo=[])
    assert chat.opening() == completion.opening() == b""
    assert json.loads(chat.deltas(nothing, Usage(2, 1))[6:])["choices"][0]["delta"]["role"] == "assistant"
    assert json.loads(completion.deltas(nothing, Usage(2, 1))[6:])["choices"][0]["text"] == ""


def test_the_only_model_need_not_be_named():
    assert call_of({"prompt": "hi", "model": None}).model == "m"


def test_a_bool_is_no_number_where_only_a_number_is_harmless():
    assert error_of({"prompt": "hi", "best_of": True}).param == "best_of"
    assert call_of({"prompt": "hi", "best_of": 1}).n == 1


@pytest.mark.parametrize(("prompt", "prompts"), [("ab", 1), (["a", "b"], 2), ([65, 66], 1), ([[65], [66, 67]], 2)])
def test_prompts_come_as_text_or_tokens_alone_or_in_a_batch(prompt: Any, prompts: int):
    assert len(call_of({"prompt": prompt}).prompts) == prompts


def test_prompts_and_choices_of_one_request_are_bounded():
    call_of({"prompt": ["a"] * PROMPTS_MAX, "n": 2})
    for body, param in (
        ({"prompt": ["a"] * (PROMPTS_MAX + 1)}, "prompt"),
        ({"prompt": ["a"] * PROMPTS_MAX, "n": 3}, "n"),
    ):
        assert error_of(body).param == param


def test_the_models_live_limit_rules_where_it_is_lower():
    models = registry(live=Serving(1, 100))
    assert error_of({"prompt": "hi", "max_tokens": 200}, models).code == "context_length_exceeded"
    assert call_of({"messages": USER}, models).sampling.max_tokens < 100


def test_a_prompt_of_exactly_the_models_length_leaves_no_room():
    assert error_of({"prompt": [1] * LENGTH}).param == "prompt"
    assert call_of({"prompt": [1] * (LENGTH - 1)}).sampling.max_tokens == 1


def test_content_parts_are_joined_for_templates_that_want_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert prompt_of([{"role": "user", "content": parts}]) == "<bos><user>a\nb<eos><assistant>"


def test_templates_that_walk_over_parts_get_parts():
    template = "{% for m in messages %}{% for p in m.content %}[{{ p.type }}:{{ p.text }}]{% endfor %}{% endfor %}"
    assert prompt_of([{"role": "user", "content": "a"}], template) == "[text:a]"


def test_what_other_providers_put_into_messages_is_ignored():
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    said = {"role": "assistant", "content": "b", "refusal": "no", "thinking_blocks": [{}], "annotations": [1]}
    assert prompt_of([{"role": "user", "content": [part], "colour": 1}, said]) == prompt_of(
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    )


def test_thoughts_and_effort_reach_the_template():
    template = (
        "{% for m in messages %}{{ m.reasoning }}|{{ m.reasoning_content }}|{% endfor %}"
        "{{ reasoning_effort }} {{ enable_thinking }}"
    )
    for name in ("reasoning", "reasoning_content"):
        said = {"role": "assistant", "content": "b", name: "t"}
        assert prompt_of([said], template, reasoning_effort="low") == "t|t|low True"
        assert prompt_of([said], template, reasoning_effort="none").endswith("none False")
        assert prompt_of([said], template, chat_template_kwargs={"enable_thinking": 1}).endswith(" 1")


def test_a_calls_id_is_the_outputs_own_or_made_of_its_places_and_stands_with_its_beginning():
    deltas = [
        ChoiceDelta(0, "a", 1, calls=[CallPart(0, "f", '{"x"')]),
        ChoiceDelta(0, "", 1, calls=[CallPart(0, arguments=":1}"), CallPart(1, "g", "{}", "functions.g:1")]),
    ]
    head, usage = ResponseHead("chatcmpl-7", 1, "m", 1), Usage(1, 3)
    whole = ChatResponse(head, NO_TOOLS)
    whole.deltas(deltas)
    message = json.loads(whole.body(usage))["choices"][0]["message"]
    calls = [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]]
    assert calls == [("call_7_0_0", "f", '{"x":1}'), ("functions.g:1", "g", "{}")]
    stream = ChatStream(head, include_usage=False, continuous=False)
    _role, *events = [json.loads(e[6:]) for d in deltas for e in stream.deltas([d], usage).strip().split(b"\n\n")]
    first, second = [event["choices"][0]["delta"] for event in events]
    begun = {"index": 0, "id": "call_7_0_0", "type": "function", "function": {"name": "f", "arguments": '{"x"'}}
    assert first == {"content": "a", "tool_calls": [begun]}
    assert second["tool_calls"][0] == {"index": 0, "function": {"arguments": ":1}"}}


@pytest.mark.parametrize(
    ("mode", "reason", "told", "content"),
    [
        (ToolMode.REQUIRED, "length", ["f"], ""),
        (ToolMode.REQUIRED, "tool_calls", ["f", "g"], ""),
        (ToolMode.TAGGED, "length", ["f", "g"], None),
    ],
)
def test_a_forced_call_that_is_cut_is_left_out_of_a_whole_answer(
    mode: ToolMode, reason: str, told: list[str], content: str | None
):
    whole = ChatResponse(ResponseHead("c-1", 1, "m", 1), ToolPlan(mode))
    whole.deltas([ChoiceDelta(0, "", 1, reason, calls=[CallPart(0, "f", "{}"), CallPart(1, "g", '{"a')])])
    message = json.loads(whole.body(Usage(1, 2)))["choices"][0]["message"]
    assert ([call["function"]["name"] for call in message["tool_calls"]], message["content"]) == (told, content)


def test_a_forced_call_takes_nested_models():
    """Pydantic writes a model within a model as definitions, which references name from the schema's root."""
    town = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    nested = {"type": "object", "properties": {"town": {"$ref": "#/$defs/Town"}}, "$defs": {"Town": town}}
    tools = [{"type": "function", "function": {"name": name, "parameters": nested}} for name in "fg"]
    template = "{# tools #}" + TEMPLATE
    body = {"messages": USER, "tools": tools, "tool_choice": "required", "response_format": {"type": "json_object"}}
    structured = call_of(body, registry(template)).sampling.structured
    schema = json.loads(structured.json_schema or "")
    calls = schema["items"]["anyOf"]
    assert [call["properties"]["parameters"] for call in calls] == [{"$ref": "#/$defs/f0"}, {"$ref": "#/$defs/f1"}]
    assert schema["$defs"]["f1"]["properties"]["town"] == {"$ref": "#/$defs/f1/$defs/Town"}
    assert schema["$defs"]["f1"]["$defs"]["Town"] == town


def test_a_developer_is_the_system_to_templates_that_do_not_know_one():
    assert prompt_of([{"role": "critic", "content": "a"}]) == "<bos><critic>a<eos><assistant>"
    assert prompt_of([{"role": "developer", "content": "a"}]) == "<bos><system>a<eos><assistant>"


def test_the_final_message_can_be_continued():
    messages = [*USER, {"role": "assistant", "content": "well "}]
    assert prompt_of(messages, continue_final_message=True) == "<bos><user>hi<eos><assistant>well"
    assert error_of({"messages": messages, "continue_final_message": True, "add_generation_prompt": True}).param == (
        "continue_final_message"
    )


def test_template_arguments_reach_the_template_except_its_own():
    assert prompt_of(USER, "{{ messages[0].content }}{{ mood }}", chat_template_kwargs={"mood": "!"}) == "hi!"
    assert error_of({"messages": USER, "chat_template_kwargs": {"messages": []}}).param == "chat_template_kwargs"


def test_a_template_that_raises_is_a_400_with_its_words():
    error = error_of({"messages": USER}, registry("{{ raise_exception('no users please') }}"))
    assert (error.status, error.param) == (400, "messages")
    assert "no users please" in error.message


def test_a_model_without_a_template_has_no_chat():
    assert error_of({"messages": USER}, registry(None)).param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% for x in range(10**9) %}a{% endfor %}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_reaches_nothing_outside_its_values(source: str):
    with pytest.raises(TemplateRefused):
        ChatTemplate(source, {}).render([])


def test_templates_may_use_what_hugging_faces_templates_use():
    source = (
        "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}"
        "{% generation %}x{% endgeneration %}"
    )
    assert ChatTemplate(source, {}).render([{"a": "<ü>"}, {}]) == '{"a": "<ü>"}x'


def test_every_kind_of_refusal_has_a_status():
    for kind in RefusalKind:
        error = refusal(kind, "because")
        assert 400 <= error.status < 600
    assert set(REFUSALS) == set(RefusalKind)


def test_the_document_names_what_is_taken_and_the_models_and_not_what_is_refused():
    schemas = openapi_document("1", ["m"], [], [])["components"]["schemas"]
    properties = schemas["ChatRequest"]["properties"]
    assert "logit_bias" in properties
    assert "audio" not in properties
    assert schemas["ChatRequest"]["additionalProperties"] is False
    assert schemas["ScoreRequest"]["properties"]["model"] == {"enum": ["m", None]}
    more = openapi_document("1", ["m"], ["adapter"], ["cascade"])["components"]["schemas"]
    assert more["ScoreRequest"]["properties"]["model"] == {"enum": ["m", "adapter", None]}
    assert more["ChatRequest"]["properties"]["model"] == {"enum": ["m", "adapter", "cascade", None]}
    assert schemas["MessagesRequest"]["properties"]["model"] == {"enum": ["m"]}
    tool = {"type": "function", "function": {"name": "f\n"}}
    assert schemas["Function"]["properties"]["name"]["pattern"].endswith("+$")
    assert error_of({"messages": USER, "tools": [tool]}).param == "tools[0].function.name"
    assert "model" not in schemas["LoadAdapterRequest"]["properties"]


def test_tokenize_and_detokenize_have_vllms_shapes():
    models = registry()
    answer = json.loads(tokenize(b'{"prompt":"hi","return_token_strs":true}', models))
    assert answer == {"count": 3, "max_model_len": LENGTH, "tokens": [256, 71, 72], "token_strs": ["<bos>", "h", "i"]}
    chat = json.loads(tokenize(json.dumps({"model": "m", "messages": USER}).encode(), models))
    assert chat["tokens"] == call_of({"messages": USER}).prompts[0]
    back = detokenize(json.dumps({"tokens": chat["tokens"]}).encode(), models)
    assert json.loads(back) == {"prompt": USER_PROMPT}


def test_text_is_escaped_in_streams_as_json_wants_it():
    head = ResponseHead("chatcmpl-1", 1, 'a"b', 1)
    text = 'quote " line\nübung \u2028 \x01'
    for stream, get in (
        (ChatStream(head, include_usage=False, continuous=False), lambda c: c["delta"]["content"]),
        (CompletionStream(head, include_usage=False, continuous=False, echo=[]), lambda c: c["text"]),
    ):
        stream.deltas([ChoiceDelta(0, "first", 1)], Usage(1, 1))
        event = stream.deltas([ChoiceDelta(0, text, 1)], Usage(1, 2))
        assert event.endswith(b"\n\n")
        assert event.count(b"\n") == 2
        document = json.loads(event[6:])
        assert (get(document["choices"][0]), document["model"]) == (text, 'a"b')


def test_text_that_a_chats_parser_holds_back_gives_no_event():
    stream = ChatStream(ResponseHead("c-1", 1, "m", 1), include_usage=False, continuous=False)
    stream.deltas([ChoiceDelta(0, "a", 1)], Usage(1, 1))
    assert stream.deltas([ChoiceDelta(0, "", 1)], Usage(1, 1)) == b""


def test_completions_always_give_the_chosen_tokens_logprob_besides_the_likeliest():
    entry = DeltaLogprob("b", -2.0, b"b", [("a", -0.1, b"a")])
    unknown = DeltaLogprob("", -9999.0, b"", [])
    for entries, top in (
        ([entry], [{"b": -2.0, "a": -0.1}]),
        ([DeltaLogprob("b", -2.0, b"b", []), unknown], [{"b": -2.0}, None]),
    ):
        assert CompletionLogprobs().take(entries)["top_logprobs"] == top


def test_continuous_usage_begins_with_the_prompts_tokens():
    head = ResponseHead("c-1", 1, "m", 1, 7)
    for stream in (
        ChatStream(head, include_usage=True, continuous=True),
        CompletionStream(head, include_usage=True, continuous=True, echo=[EchoedPrompt("a", "a")]),
    ):
        first = stream.opening() or stream.deltas([ChoiceDelta(0, "", 1)], Usage(7, 1))
        usage = json.loads(first[6:])["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (7, 0, 7)


@pytest.mark.parametrize(
    ("fields", "echoed"),
    [
        ({"continue_final_message": True, "add_generation_prompt": False}, "An apple"),
        ({"add_generation_prompt": False}, "An apple"),
        ({}, "An apple"),
        ({"messages": USER}, ""),
        ({"echo": False}, ""),
    ],
)
def test_a_chats_last_message_stands_before_an_answer_in_its_role(fields: dict[str, Any], echoed: str):
    body = {"messages": [*USER, {"role": "assistant", "content": "An apple"}], "echo": True} | fields
    parsed = parse_chat_request(json.dumps(body).encode(), registry())
    assert parsed.echo is bool(echoed)


def test_an_echo_is_told_whole_and_streamed():
    head, echo = ResponseHead("c-1", 1, "m", 1), [EchoedPrompt("An apple", "")]
    whole = ChatResponse(head, NO_TOOLS, echo)
    whole.deltas([ChoiceDelta(0, " a day", 2), ChoiceDelta(0, "", 1, "stop", "END")])
    choice = json.loads(whole.body(Usage(1, 2)))["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "END")
    assert choice["message"]["content"] == "An apple a day"
    stream = ChatStream(head, include_usage=False, continuous=False, echo=echo)
    told = stream.deltas([ChoiceDelta(0, " a day", 2, "stop")], Usage(1, 2))
    events = [json.loads(event[6:])["choices"][0] for event in told.split(b"\n\n") if event]
    assert [event["delta"]["content"] for event in events] == ["", "An apple", " a day"]


@pytest.mark.parametrize(("seed", "name"), [(-(2**63) - 1, "greater_than_equal"), (2**63, "less_than_equal")])
def test_a_value_out_of_bounds_is_told_by_pydantics_name_too(seed: int, name: str):
    assert name in error_of({"messages": USER, "seed": seed}).message


def test_a_folder_in_hugging_faces_layout_is_read(tmp_path: Path):
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<eos>"}, "chat_template": "old"})
    )
    (tmp_path / "chat_template.jinja").write_text("new {{ eos_token }}")
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 77, "eos_token_id": 3}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    tokenizer = ModelTokenizer.load(tmp_path)
    assert tokenizer.template.render([]) == "new <eos>"
    assert (tokenizer.max_model_len, tokenizer.eos_token_ids) == (77, frozenset({3, 5, 6, 257}))


@pytest.mark.parametrize(
    ("config", "engines", "limit"),
    [
        ({"max_position_embeddings": 77}, 0, 77),
        ({"text_config": {"max_position_embeddings": 77}}, 50, 50),
        ({"model_type": "mamba2"}, 900, 900),
        ({"model_type": "mamba2"}, 0, LENGTH_UNKNOWN),
    ],
)
def test_the_limit_of_a_context_is_read_where_a_family_has_it(config: dict[str, Any], engines: int, limit: int):
    model = ServedModel(name="m", tokenizer=byte_tokenizer(), max_model_len=context_length_of(config))
    registry = ModelRegistry({"m": model}, lambda _: Serving(1, engines, True))
    assert registry.limit(model) == limit


def test_the_api_page_names_every_parameter_that_is_taken():
    page = (Path(__file__).resolve().parents[2] / "docs" / "API.md").read_text()
    for kind in (ChatRequest, CompletionRequest):
        taken = {field.name for field in msgspec.structs.fields(kind)}
        assert {name for name in taken if f"`{name}`" not in page and f"`{name}:" not in page} == set()


SEES = "{% for p in m.content %}{{ '<i>' if p.type == 'image' else p.text }}{% endfor %}"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk=", "detail": "low"}}


def seeing(before: str = "") -> ModelRegistry:
    """Models that see images; ``before`` stands before each message."""
    template = ChatTemplate("{% for m in messages %}" + before + SEES + "{% endfor %}", {})
    tokenizer = ModelTokenizer(byte_tokenizer(), template, max_model_len=LENGTH, config={"vision_config": {}})
    model = ServedModel(name="m", tokenizer=tokenizer, max_model_len=LENGTH)
    return ModelRegistry({"m": model}, lambda name: ALIVE)


def seen(*parts: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], **fields}


def test_images_are_read_in_their_places_and_keep_prefixes_apart():
    body = seen({"type": "text", "text": "a"}, IMAGE, {"text": "b"}, IMAGE)
    parsed = parse_chat_request(json.dumps(body).encode(), seeing())
    assert (parsed.texts, parsed.image_files) == (["a<i>b<i>"], [b"hi", b"hi"])
    salts = set()
    for files in ([b"hi", b"hi"], [b"hih", b"i"], [b"hi"]):
        parsed = msgspec.structs.replace(parsed, images=images_of(files, [1, 2]))
        call = build_call(parsed, [[3, 4, 5]], Caller(request="r"), LENGTH)
        assert (call.sampling.images.data, call.sampling.images.prompt, call.prompts) == (files, [1, 2], [[3, 4, 5]])
        salts.add(call.sampling.prefix_salt)
    assert len(salts) == 3


def test_images_and_token_ids_go_into_one_message():
    body = json.dumps(seen(IMAGE, max_tokens=100_000)).encode()
    large = images_of([bytes(700_000)], [1])
    parsed = msgspec.structs.replace(parse_chat_request(body, seeing()), images=large)
    with pytest.raises(ApiError, match="539985 bytes"):
        build_call(parsed, [[3, 4]], Caller(request="r"), 200_000)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (seen(IMAGE, truncate_prompt_tokens=4), "not cut"),
        (seen(IMAGE, kv_transfer_params={"prompt_token_ids": [1]}), "Token ids with images"),
        (seen({"type": "image_url"}), "`messages[0].content[0].image_url`"),
        (seen({"type": "text"}), "`messages[0].content[0].text`"),
        (seen({"type": "image_url", "image_url": {"url": "data:text/plain,a"}}), "must begin with"),
        (seen({"type": "input_audio"}), "'input_audio' is none of 'image_url', 'text'"),
    ],
)
def test_parts_that_cannot_be_used_are_told(body: dict[str, Any], words: str):
    assert words in error_of(body, seeing()).message


def test_images_are_refused_where_they_would_be_ignored():
    assert "This model takes no images" in error_of(seen(IMAGE)).message
    with pytest.raises(ApiError, match="chats alone"):
        tokenize(json.dumps(seen(IMAGE)).encode(), seeing())
    with pytest.raises(ApiError, match="send such a chat alone"):
        parse_batch_request(json.dumps({"messages": [seen(IMAGE)["messages"]]}).encode(), seeing())
