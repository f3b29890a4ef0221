"""Bounds of a model on what a schema leaves open, and the shipped models' forced tool calls."""

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from millrace.actor.errors import ConfigError
from millrace.contracts.worker import StructuredOutput

from services.ingress.api.errors import ApiError
from services.ingress.api.model_schema_bounds import BOUNDS_FILE, NO_BOUNDS, SchemaBounds, bounded_output, read_bounds
from services.ingress.api.models import ModelRegistry, ServedModel, Serving
from services.ingress.api.parsed_requests import Caller, build_call, parse_chat_request
from services.ingress.api.tokenizer import ModelTokenizer
from services.ingress.calls.messages import Call

BOUNDS = SchemaBounds(number_max=99, string_characters_max=10, array_items_max=3, object_properties_max=2)
SHIPPED = Path(__file__).resolve().parents[2] / "models" / "millrace-nano"
PAINT = {"type": "object", "properties": {"name": {"type": "string"}, "litres": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "paint", "parameters": PAINT}}
MESSAGES = [{"role": "user", "content": "Say the word cup 2 times."}]


def bounded(schema: dict[str, Any], bounds: SchemaBounds = BOUNDS) -> dict[str, Any]:
    out = bounded_output(StructuredOutput(json_schema=json.dumps(schema)), bounds)
    assert out.json_schema is not None
    return json.loads(out.json_schema)


@pytest.mark.parametrize(
    ("schema", "added"),
    [
        ({"type": "integer"}, {"minimum": -99, "maximum": 99}),
        ({"type": ["number", "null"]}, {"minimum": -99, "maximum": 99}),
        ({"type": "integer", "minimum": 0}, {"maximum": 99}),
        ({"type": "integer", "exclusiveMinimum": 1000}, {"maximum": 1099}),
        ({"type": "integer", "maximum": -1000}, {"minimum": -1099}),
        ({"type": "integer", "minimum": 1, "maximum": 10**12}, {}),
        ({"type": "integer", "enum": [1000, 2000]}, {}),
        ({"type": "string"}, {"maxLength": 10}),
        ({"type": "string", "minLength": 20}, {"maxLength": 20}),
        ({"type": "string", "maxLength": 500}, {}),
        ({"type": "string", "pattern": "^a+$"}, {}),
        ({"type": "string", "format": "date"}, {}),
        ({"type": "array", "items": {"const": 1}}, {"maxItems": 3}),
        ({"type": "array", "items": {"const": 1}, "minItems": 5}, {"maxItems": 5}),
        ({"type": "boolean"}, {}),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "boolean"}}}, {}),
    ],
    ids=str,
)
def test_only_what_is_open_is_bounded(schema: dict[str, Any], added: dict[str, Any]) -> None:
    assert bounded(schema) == schema | added


def test_schemas_inside_a_schema_are_bounded_and_data_is_not() -> None:
    schema = {
        "properties": {
            "type": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/n"}]},
            "b": {"items": {"type": "number"}},
        },
        "default": {"type": "string"},
        "$defs": {"n": {"type": "integer"}},
    }
    out = bounded(schema)
    assert out["properties"]["type"]["anyOf"][0]["maxLength"] == 10
    assert out["properties"]["b"]["items"]["maximum"] == out["$defs"]["n"]["maximum"] == 99
    assert out["default"] == {"type": "string"}


def is_valid(schema: dict[str, Any], value: Any) -> bool:
    return bool(jsonschema_rs.is_valid(schema, value))


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        ({}, True),
        ({"a": [True, None, 2.5], "b": {"c": "d", "e": -99}}, True),
        ({"a": 1, "b": 2, "c": 3}, False),
        ({"k" * 11: 1}, False),
        ({"a": 100}, False),
        ({"a": [1, 2, 3, 4]}, False),
        ({"a": {"b": {}}}, False),
        ([], False),
    ],
    ids=str,
)
def test_a_json_object_becomes_a_schema_of_bounded_objects(value: Any, fits: bool) -> None:
    out = bounded_output(StructuredOutput(json_object=True), BOUNDS)
    assert not out.json_object
    assert is_valid(json.loads(out.json_schema or "null"), value) is fits


@pytest.mark.parametrize(
    ("schema", "fits", "too_much"),
    [
        ({"type": "object"}, {"a": 1}, {"a": "x" * 11}),
        ({"type": "object", "additionalProperties": True}, {"a": [1]}, {"a": 1, "b": 2, "c": 3}),
        ({"type": "object", "additionalProperties": {"type": "string"}}, {"a": "b"}, {"k" * 11: "b"}),
        ({"type": "object", "properties": {"x": {"title": "X"}}}, {"x": [1]}, {"x": [[1]]}),
        ({"type": "array"}, [1, "a"], ["x" * 11]),
        ({"type": "array", "items": {}}, [1, {"a": 1}], [{"a": {"b": {"c": 1}}}]),
        ({"type": "object", "minProperties": 3}, {"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 2, "c": 3, "d": 4}),
    ],
    ids=str,
)
def test_values_of_any_type_are_bounded(schema: dict[str, Any], fits: Any, too_much: Any) -> None:
    out = bounded(schema)
    assert is_valid(out, fits)
    assert is_valid(schema, too_much)
    assert not is_valid(out, too_much)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "maxProperties": 9, "propertyNames": {"pattern": "^a"}, "additionalProperties": False},
        {"type": "object", "properties": {"x": {"type": "boolean"}}},
        {"type": "object", "properties": {"x": {"enum": [1]}}, "additionalProperties": False},
        {"type": "object", "properties": {"x": {"anyOf": [{"type": "null"}]}}},
        {"type": "array", "items": {"const": 1}, "maxItems": 9},
        {"type": "array", "prefixItems": [{"const": 1}], "maxItems": 1},
    ],
    ids=str,
)
def test_an_object_that_says_what_it_holds_is_kept(schema: dict[str, Any]) -> None:
    assert bounded(schema) == schema


def test_bounds_without_a_number_of_properties_leave_json_objects_open() -> None:
    structured = StructuredOutput(json_object=True)
    assert bounded_output(structured, SchemaBounds(number_max=9)) is structured


def test_a_model_without_bounds_changes_nothing() -> None:
    structured = StructuredOutput(json_schema='{"type":"integer"}')
    assert bounded_output(structured, NO_BOUNDS) is structured
    assert bounded_output(StructuredOutput(json_object=True), NO_BOUNDS) == StructuredOutput(json_object=True)
    assert bounded_output(StructuredOutput(regex="a+"), BOUNDS) == StructuredOutput(regex="a+")
    assert bounded_output(None, BOUNDS) is None


def test_bounds_are_read_from_the_models_folder_and_a_wrong_file_is_refused(tmp_path: Path) -> None:
    assert read_bounds(tmp_path) == NO_BOUNDS
    (tmp_path / BOUNDS_FILE).write_text('{"array_items_max": 4}')
    assert read_bounds(tmp_path) == SchemaBounds(array_items_max=4)
    (tmp_path / BOUNDS_FILE).write_text('{"items": 4}')
    with pytest.raises(ConfigError, match=r"schema_bounds\.json.*items"):
        read_bounds(tmp_path)


def shipped_call(**fields: Any) -> tuple[Call, ModelTokenizer]:
    tokenizer = ModelTokenizer.load(SHIPPED)
    models = ModelRegistry(
        {"m": ServedModel(name="m", tokenizer=tokenizer, max_model_len=4096)}, lambda name: Serving(1, 0)
    )
    body = json.dumps({"model": "m", "messages": MESSAGES} | fields).encode()
    parsed = parse_chat_request(body, models)
    prompts = [tokenizer.encode(text, special=parsed.special) for text in parsed.texts or []]
    return build_call(parsed, prompts, Caller(request="r"), 4096), tokenizer


def test_a_shipped_model_bounds_json_and_keeps_the_order_of_the_clients_properties() -> None:
    """A schema that asks for reasons before the answer gets them in that order, as at OpenAI."""
    call, _ = shipped_call(response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": PAINT}})
    told = json.loads(call.sampling.structured.json_schema or "")["properties"]
    assert list(told) == ["name", "litres"]
    assert (told["litres"]["maximum"], told["name"]["maxLength"]) == (999_999_999, 40)
    call, _ = shipped_call(response_format={"type": "json_object"})
    assert json.loads(call.sampling.structured.json_schema or "")["maxProperties"] == 4


def test_a_shipped_model_takes_forced_calls_within_its_bounds() -> None:
    call, tokenizer = shipped_call(tools=[TOOL], tool_choice="required")
    assert tokenizer.decode(call.prompts[0]).startswith("<|bos|><|system|>Functions: paint<|eos|><|user|>")
    told = json.loads(call.sampling.structured.json_schema or "")
    assert told["maxItems"] == 4
    assert told["items"]["anyOf"][0]["properties"]["parameters"]["properties"]["name"]["maxLength"] == 40


def test_a_shipped_model_refuses_calls_of_its_own_choice() -> None:
    with pytest.raises(ApiError, match="writes no <tool_call> tags") as refused:
        shipped_call(tools=[TOOL])
    assert refused.value.param == "tool_choice"


def test_a_shipped_models_template_writes_calls_and_their_results() -> None:
    said = {"id": "c", "type": "function", "function": {"name": "paint", "arguments": '{"litres":3}'}}
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [said]},
        {"role": "tool", "tool_call_id": "c", "content": "dry"},
    ]
    call, tokenizer = shipped_call(messages=turns)
    text = tokenizer.decode(call.prompts[0])
    assert text.endswith('<|assistant|>paint {"litres": 3}<|eos|><|user|>dry<|eos|><|assistant|>')
