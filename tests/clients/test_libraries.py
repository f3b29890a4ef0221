"""Client libraries against a shipped model: whole answers, streams, structured output, and what is refused.

The shipped models do not know tools, and do not end free strings and numbers of a schema; the schema here has neither.
"""

from __future__ import annotations

import os
from typing import Any, Literal

import instructor
import litellm
import openai
import pytest
from instructor.core import InstructorRetryException
from langchain_openai import ChatOpenAI
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from openai import OpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

BASE, MODEL = os.environ["MILLRACE_URL"] + "/v1", os.environ["MILLRACE_MODEL"]
#: The model answers every prompt of this task (models/millrace-mini/README.md).
PROMPT, ANSWER = "Please reverse: jyaiptx", "xtpiayj"
MESSAGES: Any = [{"role": "user", "content": PROMPT}]
WHERE: Any = {"base_url": BASE, "api_key": "none"}


class Paint(BaseModel):
    """A schema whose every field ends by itself."""

    colour: Literal["red", "green", "blue"]
    matt: bool


@pytest.fixture
def client() -> OpenAI:
    return OpenAI(**WHERE, max_retries=0)


@pytest.fixture
def chat() -> ChatOpenAI:
    return ChatOpenAI(**WHERE, model=MODEL, temperature=0, max_completion_tokens=60, max_retries=0)


@pytest.fixture
def agent_model() -> OpenAIChatModel:
    return OpenAIChatModel(MODEL, provider=OpenAIProvider(**WHERE))


def test_openai_whole_and_streamed(client: OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 60}
    assert client.chat.completions.create(**asked).choices[0].message.content == ANSWER
    with client.chat.completions.stream(**asked) as stream:
        assert stream.get_final_completion().choices[0].message.content == ANSWER


def test_openai_parse(client: OpenAI) -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Paint, max_tokens=60)
    assert isinstance(answer.choices[0].message.parsed, Paint)


def test_tools_are_refused_with_the_reason(client: OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "paint", "parameters": Paint.model_json_schema()}}
    with pytest.raises(openai.BadRequestError, match="chat template does not know them") as refused:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[tool])
    assert refused.value.param == "tools"


def test_langchain_whole_streamed_and_in_batches(chat: ChatOpenAI) -> None:
    assert chat.invoke(PROMPT).content == ANSWER
    assert "".join(str(chunk.content) for chunk in chat.stream(PROMPT)) == ANSWER
    assert [each.content for each in chat.batch([PROMPT, PROMPT])] == [ANSWER, ANSWER]


def test_langchain_structured_output(chat: ChatOpenAI) -> None:
    assert isinstance(chat.with_structured_output(Paint, method="json_schema").invoke(PROMPT), Paint)


def test_litellm_whole_and_streamed() -> None:
    asked: Any = {
        "model": f"openai/{MODEL}",
        "api_base": BASE,
        "api_key": "none",
        "messages": MESSAGES,
        "temperature": 0,
        "max_tokens": 60,
    }
    assert litellm.completion(**asked).choices[0].message.content == ANSWER
    chunks = litellm.completion(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER


def test_llama_index_whole_and_streamed() -> None:
    llm = OpenAILike(api_base=BASE, api_key="none", model=MODEL, is_chat_model=True, temperature=0, max_tokens=60)
    asked = [ChatMessage(role="user", content=PROMPT)]
    assert llm.chat(asked).message.content == ANSWER
    assert "".join(part.delta or "" for part in llm.stream_chat(asked)) == ANSWER


@pytest.mark.parametrize("mode", [instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON], ids=str)
def test_instructor_in_its_json_modes(mode: instructor.Mode) -> None:
    client = instructor.from_openai(OpenAI(**WHERE), mode=mode)
    asked: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 60, "temperature": 0}
    if mode is instructor.Mode.JSON:  # json_object does not hold the model to the schema
        with pytest.raises(InstructorRetryException):
            client.chat.completions.create(**asked, response_model=Paint, max_retries=1)
        return
    assert isinstance(client.chat.completions.create(**asked, response_model=Paint), Paint)


def test_pydantic_ai_text_and_output_type(agent_model: OpenAIChatModel) -> None:
    settings: Any = {"max_tokens": 60, "temperature": 0}
    assert Agent(agent_model).run_sync(PROMPT, model_settings=settings).output == ANSWER
    native = Agent(agent_model, output_type=NativeOutput(Paint))
    assert isinstance(native.run_sync(PROMPT, model_settings=settings).output, Paint)
