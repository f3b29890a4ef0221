"""Agents' clients against the HTTP side: OpenAI's Responses, Anthropic's Messages."""

import json
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from millrace.contracts.keyfile import KeyFile, KeyRecord, format_key_file, hash_key

from services.ingress.calls.messages import RefusalKind
from services.ingress.http.keys import ApiKeyStore
from tests.live.ingress_rig import Rig, served

CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Oslo"}}\n</tool_call>'
PARAMETERS: Any = {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}
FUNCTION: Any = {"type": "function", "name": "weather", "description": "", "parameters": PARAMETERS, "strict": None}

pytestmark = pytest.mark.filterwarnings("ignore:Overriding the:pytest.PytestDeprecationWarning")


async def test_a_response_whole_and_streamed(client: openai.AsyncOpenAI, rig: Rig):
    asked: Any = {"model": "tiny", "input": "hi", "instructions": "be brief", "max_output_tokens": 3}
    answer = await client.responses.create(**asked)
    assert (answer.output_text, answer.status) == ("w0 w1 w2 ", "incomplete")
    assert answer.usage.output_tokens == 3
    events = [event async for event in await client.responses.create(**asked, stream=True)]
    assert [event.delta for event in events if event.type == "response.output_text.delta"] == ["w0 ", "w1 ", "w2 "]
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == "w0 w1 w2 "
    assert len(rig.core.calls) == 2


async def test_a_response_with_a_tools_call_and_its_result(client: openai.AsyncOpenAI, rig: Rig):
    tokens = rig.core.say(CALL, "stop")
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
    rig.core.say("18 degrees", "stop")
    answer = await client.responses.create(input=[*turns, *output, result], **asked)
    assert answer.output_text == "18 degrees"


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
    assert (last.response.output_text, last.response.error.message) == ("w0 ", "no instance")


# Messages.

SHORT: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


@pytest.fixture
async def claude(rig: Rig):
    async with anthropic.AsyncAnthropic(base_url=rig.url, api_key="none", max_retries=0) as client:
        yield client


async def test_a_message_whole_and_streamed(claude: anthropic.AsyncAnthropic, rig: Rig):
    answer = await claude.messages.create(**SHORT, system="be brief")
    (text,) = answer.content
    assert text.type == "text"
    assert (text.text, answer.stop_reason, answer.usage.output_tokens) == ("w0 w1 w2 ", "max_tokens", 3)
    async with claude.messages.stream(**SHORT) as stream:
        assert [piece async for piece in stream.text_stream] == ["w0 ", "w1 ", "w2 "]
        final = await stream.get_final_message()
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 3)
    assert len(rig.core.calls) == 2


async def test_a_message_with_a_tools_call_and_its_result(claude: anthropic.AsyncAnthropic, rig: Rig):
    tokens = rig.core.say(CALL, "stop")
    turns: list[Any] = [{"role": "user", "content": "weather?"}]
    tool: Any = {"name": "weather", "input_schema": PARAMETERS}
    asked: Any = {"model": "tools", "tools": [tool], "max_tokens": tokens}
    async with claude.messages.stream(messages=turns, **asked) as stream:
        answer = await stream.get_final_message()
    (call,) = answer.content
    assert call.type == "tool_use"
    assert (call.name, call.input, answer.stop_reason) == ("weather", {"town": "Oslo"}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "18"}
    rig.core.say("18 degrees", "stop")
    turns += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    (text,) = (await claude.messages.create(messages=turns, **asked)).content
    assert text.type == "text"
    assert text.text == "18 degrees"


async def test_tokens_are_counted_as_they_are_used(claude: anthropic.AsyncAnthropic, rig: Rig):
    answer = await claude.messages.create(**SHORT)
    counted = await claude.messages.count_tokens(model="tiny", messages=SHORT["messages"])
    assert counted.input_tokens == answer.usage.input_tokens == len(rig.core.calls[0].prompts[0])
    long: Any = [{"role": "user", "content": "x" * 100_000}]  # tokenised in a thread
    assert (await claude.messages.count_tokens(model="tiny", messages=long)).input_tokens > 100_000


async def test_errors_of_messages(claude: anthropic.AsyncAnthropic, rig: Rig):
    with pytest.raises(anthropic.NotFoundError):
        await claude.messages.create(**SHORT | {"model": "nobody"})
    with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
        await claude.messages.create(**SHORT | {"max_tokens": 5000})
    rig.core.refuse = (RefusalKind.RATE_LIMITED, "slow down", 1.0)
    with pytest.raises(anthropic.RateLimitError):
        await claude.messages.create(**SHORT)
    rig.core.refuse, rig.core.fail_after = None, 1
    with pytest.raises(anthropic.APIStatusError, match="no instance"):
        async with claude.messages.stream(**SHORT) as stream:
            await stream.get_final_message()


async def test_a_key_may_come_as_anthropics_client_sends_it(tmp_path: Path):
    file = tmp_path / "keys.toml"
    file.write_text(format_key_file(KeyFile(keys=[KeyRecord(name="me", sha256=hash_key("right"))])))
    async with served(tmp_path, keys=ApiKeyStore(file)) as rig:
        async with anthropic.AsyncAnthropic(base_url=rig.url, api_key="right", max_retries=0) as client:
            await client.messages.create(**SHORT)
        assert rig.core.calls[0].key == "me"
        async with anthropic.AsyncAnthropic(base_url=rig.url, api_key="wrong", max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(**SHORT)
        async with httpx.AsyncClient(base_url=rig.url) as client:
            answer = await client.post("/v1/messages", json=SHORT)
            assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
