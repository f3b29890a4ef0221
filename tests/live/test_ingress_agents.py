"""Agents' clients against the HTTP side: OpenAI's Responses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from services.ingress.calls.messages import Call, RefusalKind
from tests.live.ingress_rig import Rig, served

CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Oslo"}}\n</tool_call>'
PARAMETERS: Any = {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}
FUNCTION: Any = {"type": "function", "name": "weather", "description": "", "parameters": PARAMETERS, "strict": None}

pytestmark = pytest.mark.filterwarnings("ignore:Overriding the:pytest.PytestDeprecationWarning")


@pytest.fixture
async def rig(tmp_path: Path):
    async with served(tmp_path) as rig:
        yield rig
        assert rig.bugs == []


@pytest.fixture
async def client(rig: Rig):
    async with openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def says(rig: Rig, text: str) -> int:
    """Make the core say a text, a character per token; return its tokens."""

    def words(call: Call, i: int) -> str:
        return text[i] if i < len(text) else ""

    rig.core.words, rig.core.finish = words, "stop"
    return len(text)


async def test_a_response_whole_and_streamed(client: openai.AsyncOpenAI, rig: Rig):
    asked: Any = {"model": "tiny", "input": "hi", "instructions": "be brief", "max_output_tokens": 3}
    answer = await client.responses.create(**asked)
    assert (answer.output_text, answer.status) == ("w0 w1 w2 ", "incomplete")
    assert answer.usage is not None
    assert answer.usage.output_tokens == 3
    events = [event async for event in await client.responses.create(**asked, stream=True)]
    assert [event.delta for event in events if event.type == "response.output_text.delta"] == ["w0 ", "w1 ", "w2 "]
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == "w0 w1 w2 "
    assert len(rig.core.calls) == 2


async def test_a_response_with_a_tools_call_and_its_result(client: openai.AsyncOpenAI, rig: Rig):
    tokens = says(rig, CALL)
    turns: Any = [{"role": "user", "content": "weather?"}]
    asked: Any = {"model": "tools", "tools": [FUNCTION], "max_output_tokens": tokens}
    async with client.responses.stream(input=turns, **asked) as stream:
        async for _ in stream:
            pass
        output: list[Any] = list((await stream.get_final_response()).output)
    (call,) = output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("weather", {"town": "Oslo"})
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "18"}
    says(rig, "18 degrees")
    answer = await client.responses.create(input=[*turns, *output, result], **asked)
    assert answer.output_text == "18 degrees"


async def test_a_response_that_is_parsed(client: openai.AsyncOpenAI, rig: Rig):
    tokens = says(rig, '{"a":1}')
    schema: Any = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form: Any = {"format": {"type": "json_schema", "name": "thing", "schema": schema}}
    answer = await client.responses.create(model="tiny", input="hi", text=form, max_output_tokens=tokens)
    assert json.loads(answer.output_text) == {"a": 1}
    structured = rig.core.calls[0].sampling.structured
    assert structured is not None
    assert json.loads(structured.json_schema or "") == schema


async def test_errors_of_responses(client: openai.AsyncOpenAI, rig: Rig):
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model="nobody", input="hi")
    with pytest.raises(openai.BadRequestError) as bad:
        await client.responses.create(model="tiny", input="hi", max_output_tokens=10**6)
    assert (bad.value.code, bad.value.param) == ("context_length_exceeded", "max_output_tokens")
    rig.core.refuse = (RefusalKind.RATE_LIMITED, "slow down", 1.0)
    with pytest.raises(openai.RateLimitError):
        await client.responses.create(model="tiny", input="hi")
    rig.core.refuse, rig.core.fail_after = None, 1
    stream = await client.responses.create(model="tiny", input="hi", max_output_tokens=5, stream=True)
    last = [event async for event in stream][-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert (last.response.output_text, last.response.error.message) == ("w0 ", "no instance")
