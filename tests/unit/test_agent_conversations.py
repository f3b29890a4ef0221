"""Conversations that millrace-agent learns from: ingress reads their calls, and renders the same prompts."""

import json
from random import Random
from typing import Any

import pytest

from models.training.conversations import (
    COMPACT,
    SHARES,
    SPACED,
    Conversation,
    Separators,
    draw_conversation,
    value_parts,
)
from models.training.functions import draw_function
from models.training.tokenizer import AGENT, BOS, EOS, TASKS, build_tokenizer, token_id, tokenizer_config
from services.ingress.api.tokenizer import ChatTemplate
from services.ingress.api.tool_call_parser import ToolCallParser
from services.ingress.api.tools import ToolMode, ToolPlan

TEMPLATE = ChatTemplate(AGENT.template, {"bos_token": BOS, "eos_token": EOS})


def drawn(kind: str, count: int = 60) -> list[Conversation]:
    rng = Random(f"5 {kind}")
    return [draw_conversation(rng, kind) for _ in range(count)]


def text(conversation: Conversation) -> str:
    return "".join(part for part, _ in conversation.answer)


def arguments_fit(tools: list[dict[str, Any]], name: str, arguments: dict[str, Any]) -> bool:
    (function,) = [tool["function"] for tool in tools if tool["function"]["name"] == name]
    return list(arguments) == function["parameters"]["required"]


@pytest.mark.parametrize(("kind", "calls"), [("call", 1), ("calls", 2)])
def test_ingress_reads_the_calls_of_an_answer(kind: str, calls: int) -> None:
    for conversation in drawn(kind):
        rest, read = ToolCallParser(ToolPlan(ToolMode.TAGGED)).push(text(conversation), finished=True)
        assert rest == ""
        assert len(read) == calls
        assert all(arguments_fit(conversation.tools, call.name, json.loads(call.arguments)) for call in read)


def test_a_forced_call_is_what_ingress_constrains_it_to() -> None:
    for conversation in drawn("required"):
        _, (call,) = ToolCallParser(ToolPlan(ToolMode.REQUIRED)).push(text(conversation), finished=True)
        assert arguments_fit(conversation.tools, call.name, json.loads(call.arguments))
    for conversation in drawn("named"):
        assert isinstance(json.loads(text(conversation)), dict)


@pytest.mark.parametrize(
    ("separators", "written"),
    [
        (SPACED, '{"name": "Ada", "age": 31, "tags": ["x", "y"]}'),
        (COMPACT, '{"name":"Ada","age":31,"tags":["x","y"]}'),
    ],
)
def test_an_object_is_learnt_in_its_values_and_their_ends(separators: Separators, written: str) -> None:
    parts = value_parts({"name": "Ada", "age": 31, "tags": ["x", "y"]}, separators)
    assert "".join(part for part, _ in parts) == written
    assert [part for part, learnt in parts if learnt] == ['Ada"', ",", "31", ",", written[written.index("[") : -1], "}"]


@pytest.mark.parametrize("kind", ["named", "required", "json"])
def test_answers_behind_a_grammar_come_with_and_without_blanks(kind: str) -> None:
    texts = [text(conversation) for conversation in drawn(kind)]
    assert {'": ' in each for each in texts} == {True, False}


def test_listed_functions_differ_in_name_and_purpose() -> None:
    for conversation in drawn("call"):
        names = [tool["function"]["name"] for tool in conversation.tools]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("kind", SHARES)
def test_the_answers_text_survives_the_tokenizer(kind: str) -> None:
    tokenizer = build_tokenizer(AGENT)
    for conversation in drawn(kind, 20):
        parts = [tokenizer.encode(part, add_special_tokens=False).ids for part, _ in conversation.answer]
        assert tokenizer.decode([token for ids in parts for token in ids]) == text(conversation)


def test_the_template_lists_functions_and_writes_calls_and_results() -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "unit": {"enum": ["C", "F"]},
                    "days": {"type": ["integer", "null"]},
                },
            },
        },
    }
    bare = {"type": "function", "function": {"name": "ping"}}
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    messages = [
        {"role": "user", "content": "And in Rome?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "18 C", "tool_call_id": "1"},
    ]
    assert TEMPLATE.render(messages, tools=[tool, bare], add_generation_prompt=True) == (
        "<|bos|><|system|>Functions:\nweather(city: string, unit: C|F, days: any) Weather of a city.\nping() <|eos|>"
        '<|user|>And in Rome?<|eos|><|assistant|><tool_call>{"name": "weather", "arguments": {"city": "Rome"}}'
        "</tool_call><|eos|><|user|>Result: 18 C<|eos|><|assistant|>"
    )


def test_ingress_takes_the_template_for_one_that_writes_calls() -> None:
    assert TEMPLATE.traits.tools
    assert TEMPLATE.traits.hermes_calls


def test_both_tokenizers_agree_but_for_the_agents_own_words() -> None:
    ours, tasks = build_tokenizer(AGENT), build_tokenizer(TASKS)
    for word in ("Count", "Ġfrom", EOS):
        assert token_id(ours, word) == token_id(tasks, word)
    assert ours.encode("<tool_call>", add_special_tokens=False).ids == [token_id(ours, "<tool_call>")]
    assert ours.get_vocab_size() == tasks.get_vocab_size()
    assert tokenizer_config(TASKS)["chat_template"] != tokenizer_config(AGENT)["chat_template"]


def test_functions_have_a_value_for_each_blank() -> None:
    rng = Random(9)
    for function in (draw_function(rng) for _ in range(300)):
        assert {wording.count("{}") for wording in function.wordings} == {len(function.parameters)}
