"""Reasoning and calls of models whose output vLLM's parsers read, as OpenAI's client gets them over HTTP."""

import importlib.util
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from millrace.cluster.model_parsers import ModelParsers

from services.ingress.parsing.process import ParserProcess
from tests.live.ingress_rig import Rig, served

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.asyncio(loop_scope="module"),
]

MESSAGES: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
OUTPUT = 'Where?</think>I look. <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served_rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    """One for all: its parser process imports vLLM."""
    async with served(tmp_path_factory.mktemp("served"), parsers={"tools": ModelParsers("qwen3", "hermes")}) as rig:
        rig.core.words = lambda call, i: OUTPUT[i]
        rig.core.finish = "stop"
        yield rig


@pytest.fixture
def rig(served_rig: Rig) -> Iterator[Rig]:
    for kept in (served_rig.core.calls, served_rig.spans):
        kept.clear()
    yield served_rig
    assert not served_rig.bugs


@pytest_asyncio.fixture(loop_scope="module")
async def client(rig: Rig) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_reasoning_text_and_calls_come_apart_whole_and_streamed(client: openai.AsyncOpenAI, rig: Rig):
    fields: Any = {"model": "tools", "messages": MESSAGES, "tools": TOOLS, "max_tokens": len(OUTPUT)}
    whole = await client.chat.completions.create(**fields)
    said = whole.choices[0]
    message: Any = said.message
    assert (message.reasoning, message.reasoning_content, message.content) == ("Where?", "Where?", "I look.")
    assert [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls] == [("f", {"a": 1})]
    assert (said.finish_reason, whole.usage.completion_tokens) == ("tool_calls", len(OUTPUT))
    assert whole.usage.completion_tokens_details.reasoning_tokens is not None
    reasoning, text, arguments, finish = "", "", "", ""
    async for chunk in await client.chat.completions.create(**fields, stream=True):
        delta: Any = chunk.choices[0].delta
        reasoning += getattr(delta, "reasoning", None) or ""
        text += delta.content or ""
        arguments += "".join(call.function.arguments or "" for call in delta.tool_calls or [])
        finish = chunk.choices[0].finish_reason or finish
    assert (reasoning, text.strip(), json.loads(arguments), finish) == ("Where?", "I look.", {"a": 1}, "tool_calls")


async def test_a_traced_call_has_a_span_of_its_parser_and_one_of_its_reasoning(client: openai.AsyncOpenAI, rig: Rig):
    theirs = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    fields: Any = {"model": "tools", "messages": MESSAGES, "max_tokens": len(OUTPUT), "stream": True}
    for headers in ({}, {"traceparent": theirs}):
        assert not rig.spans
        async for _ in await client.chat.completions.create(**fields, extra_headers=headers):
            pass
    parser, reasoning = rig.spans
    assert (parser.name, reasoning.name) == ("parser", "reasoning")
    assert {span.traceparent[:36] for span in rig.spans} == {theirs[:36]}
    assert parser.attributes["request"] == reasoning.attributes["request"] == rig.core.calls[1].request
    assert parser.start_ns <= reasoning.start_ns < reasoning.end_ns < parser.end_ns


async def test_a_constraint_waits_for_the_end_of_the_reasoning(client: openai.AsyncOpenAI, rig: Rig):
    fields: Any = {"model": "tools", "messages": MESSAGES, "max_tokens": 4}
    await client.chat.completions.create(**fields, response_format={"type": "json_object"})
    await client.chat.completions.create(**fields, tools=TOOLS, tool_choice="required")
    await client.chat.completions.create(
        **fields, response_format={"type": "json_object"}, extra_body={"include_reasoning": False}
    )
    form, forced, hidden = [call.sampling.structured for call in rig.core.calls]
    assert (form.json_object, form.after_reasoning) == (True, "{}")
    assert forced.structural_tag
    assert forced.after_reasoning == "{}"
    assert hidden.after_reasoning == ""


async def test_a_request_that_vllm_refuses_is_a_400(rig: Rig):
    async with httpx.AsyncClient(base_url=rig.url, timeout=60) as client:
        body = {"model": "tools", "messages": MESSAGES, "tools": TOOLS, "tool_choice": "auto", "max_tokens": 4}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        body["tools"] = [{"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}]
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 400


async def test_calls_are_503_where_the_parsers_do_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The first waits for the start that fails, the next ones do not."""
    defaults = ParserProcess.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "host", "services.ingress.parsing.nothing")
    async with (
        served(tmp_path, parsers={"tools": ModelParsers("qwen3", "hermes")}) as rig,
        httpx.AsyncClient(base_url=rig.url, timeout=20) as client,
    ):
        body = {"model": "tools", "messages": MESSAGES, "max_tokens": 4}
        for _ in range(2):
            answer = await client.post("/v1/chat/completions", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_parser")
        assert not rig.core.calls
        assert not rig.bugs
