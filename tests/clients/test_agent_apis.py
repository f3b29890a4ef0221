"""Responses and Messages against millrace-agent: OpenAI's and Anthropic's own clients."""

import json
import os
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI
from pydantic import BaseModel

URL, MODEL = os.environ["MILLRACE_URL"], os.environ["MILLRACE_MODEL"]
PROMPT, ANSWER = "Please reverse: jyaiptx", "xtpiayj"
ASKED, CALL = "What is the weather in Oslo?", ("get_weather", {"city": "Oslo"})
CITY: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
DESCRIBED = "Get the weather of a city."
FUNCTION: Any = {"type": "function", "name": "get_weather", "description": DESCRIBED, "parameters": CITY}
TOOL: Any = {"name": "get_weather", "description": DESCRIBED, "input_schema": CITY}
RESPONSES: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 200}
MESSAGES: Any = {"model": MODEL, "max_tokens": 200, "extra_body": {"temperature": 0}}


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@pytest.fixture
def openai() -> OpenAI:
    return OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)


@pytest.fixture
def anthropic() -> Anthropic:
    return Anthropic(base_url=URL, api_key="none", max_retries=0)


def test_responses_whole_and_streamed(openai: OpenAI) -> None:
    answer = openai.responses.create(input=PROMPT, **RESPONSES)
    assert (answer.output_text, answer.status) == (ANSWER, "completed")
    with openai.responses.stream(input=PROMPT, **RESPONSES) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(pieces) == stream.get_final_response().output_text == ANSWER


def test_responses_call_a_tool_and_tell_its_result(openai: OpenAI) -> None:
    turns: list[Any] = [{"role": "user", "content": ASKED}]
    with openai.responses.stream(input=turns, tools=[FUNCTION], **RESPONSES) as stream:
        stream.until_done()
        output: list[Any] = list(stream.get_final_response().output)
    (call,) = output
    assert (call.name, json.loads(call.arguments)) == CALL
    turns += [
        {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
        {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"},
    ]
    assert openai.responses.create(input=turns, tools=[FUNCTION], **RESPONSES).output_text == "18 degrees"


def test_a_tools_result_goes_on_from_a_stored_response(openai: OpenAI) -> None:
    first = openai.responses.create(input=ASKED, tools=[FUNCTION], **RESPONSES)
    (call,) = first.output
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}  # type: ignore[union-attr]
    chained = {"tools": [FUNCTION], "previous_response_id": first.id}
    answer = openai.responses.create(input=[result], **chained, **RESPONSES)
    assert answer.output_text == "18 degrees"
    assert openai.responses.retrieve(answer.id) == answer


def test_a_response_in_the_background_is_streamed_again_from_an_event(openai: OpenAI) -> None:
    events = list(openai.responses.create(input=PROMPT, background=True, stream=True, **RESPONSES))
    done: Any = events[-1]
    assert (done.type, done.response.output_text) == ("response.completed", ANSWER)
    again = openai.responses.retrieve(done.response.id, stream=True, starting_after=3)
    assert list(again) == events[4:]
    openai.responses.delete(done.response.id)


def test_responses_parse_finds_the_values(openai: OpenAI) -> None:
    answer = openai.responses.parse(input="My name is Ada. Age 31.", text_format=Person, **RESPONSES)
    assert answer.output_parsed == Person(name="Ada", age=31)


def test_messages_whole_and_streamed(anthropic: Anthropic) -> None:
    turns: Any = [{"role": "user", "content": PROMPT}]
    answer = anthropic.messages.create(messages=turns, **MESSAGES)
    assert (answer.content[0].text, answer.stop_reason) == (ANSWER, "end_turn")  # type: ignore[union-attr]
    with anthropic.messages.stream(messages=turns, **MESSAGES) as stream:
        assert "".join(stream.text_stream) == ANSWER
        assert stream.get_final_message().usage.output_tokens == answer.usage.output_tokens
    used = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    assert anthropic.messages.count_tokens(model=MODEL, messages=turns).input_tokens == used


def test_messages_call_a_tool_and_tell_its_result(anthropic: Anthropic) -> None:
    turns: list[Any] = [{"role": "user", "content": ASKED}]
    with anthropic.messages.stream(messages=turns, tools=[TOOL], **MESSAGES) as stream:
        answer = stream.get_final_message()
    (call,) = answer.content
    assert call.type == "tool_use"
    assert ((call.name, call.input), answer.stop_reason) == (CALL, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "18 degrees"}
    turns += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    (text,) = anthropic.messages.create(messages=turns, tools=[TOOL], **MESSAGES).content
    assert text.type == "text"
    assert text.text == "18 degrees"
