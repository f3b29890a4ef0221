"""Client libraries against millrace-agent: whole answers, streams, structured output, tools chosen and forced.

It was trained on tools and schemas (models/millrace-agent/README.md); Paint is asked of a prompt that says nothing of
it, so what comes back there fits the schema and means nothing.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import instructor
import litellm
import pytest
from instructor.core import InstructorRetryException
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from openai import OpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

BASE, MODEL = os.environ["MILLRACE_URL"] + "/v1", os.environ["MILLRACE_MODEL"]
#: A task that the model still answers (models/millrace-agent/README.md).
PROMPT, ANSWER = "Please reverse: jyaiptx", "xtpiayj"
MESSAGES: Any = [{"role": "user", "content": PROMPT}]
WHERE: Any = {"base_url": BASE, "api_key": "none"}


class Paint(BaseModel):
    """A schema with every kind of value that a small model does not end by itself."""

    colour: Literal["red", "green", "blue"]
    matt: bool
    litres: int
    price: float
    name: str
    coats: list[int]


TOOL: Any = {"type": "function", "function": {"name": "paint", "parameters": Paint.model_json_schema()}}
#: More than any answer within the bounds of models/millrace-agent/schema_bounds.json needs.
TOKENS = 1000


class Person(BaseModel):
    """A person."""

    name: str
    age: int


ADA = Person(name="Ada", age=31)


class Family(BaseModel):
    """A schema with a schema in it, which becomes a reference into ``$defs``."""

    head: Person
    others: list[Person]


TOLD = "My name is Ada. Age 31."
PERSON_TOLD: Any = [{"role": "user", "content": TOLD}]
WEATHER_ASKED: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": described,
            "parameters": {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]},
        },
    }
    for name, described, key in (("get_weather", "Get the weather of a city.", "city"), ("search", "", "query"))
]


def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return "18 degrees"


@pytest.fixture
def client() -> OpenAI:
    return OpenAI(**WHERE, max_retries=0)


@pytest.fixture
def chat() -> ChatOpenAI:
    return ChatOpenAI(**WHERE, model=MODEL, temperature=0, max_completion_tokens=TOKENS, max_retries=0)


@pytest.fixture
def responses() -> ChatOpenAI:
    return ChatOpenAI(**WHERE, model=MODEL, temperature=0, use_responses_api=True, max_retries=0)


@pytest.fixture(params=[OpenAIChatModel, OpenAIResponsesModel], ids=["chat", "responses"])
def agent_model(request: pytest.FixtureRequest) -> Any:
    return request.param(MODEL, provider=OpenAIProvider(**WHERE))


def test_openai_whole_and_streamed(client: OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 60}
    assert client.chat.completions.create(**asked).choices[0].message.content == ANSWER
    with client.chat.completions.stream(**asked) as stream:
        assert stream.get_final_completion().choices[0].message.content == ANSWER


@pytest.mark.parametrize("seed", range(4))
def test_openai_json_object_ends_by_itself(client: OpenAI, seed: int) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, response_format={"type": "json_object"}, seed=seed, max_tokens=TOKENS
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "paint"}}], ids=str)
def test_openai_forced_tool_calls_whole_and_streamed(client: OpenAI, choice: Any) -> None:
    asked: Any = {"model": MODEL, "messages": MESSAGES, "tools": [TOOL], "tool_choice": choice, "temperature": 0}
    asked |= {"max_tokens": TOKENS, "parallel_tool_calls": False}
    (call,) = client.chat.completions.create(**asked).choices[0].message.tool_calls or []
    assert Paint.model_validate_json(call.function.arguments)
    with client.chat.completions.stream(**asked) as stream:
        (same,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert (same.function.name, same.function.arguments) == ("paint", call.function.arguments)


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


def test_openai_the_model_chooses_a_tool_whole_and_streamed(client: OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": WEATHER_ASKED, "tools": TOOLS, "temperature": 0, "max_tokens": 200}
    choice = client.chat.completions.create(**asked).choices[0]
    assert (calls_of(choice.message), choice.finish_reason) == ([("get_weather", {"city": "Oslo"})], "tool_calls")
    pieces = 0
    with client.chat.completions.stream(**asked) as stream:
        for event in stream:
            pieces += event.type == "tool_calls.function.arguments.delta"
        assert calls_of(stream.get_final_completion().choices[0].message) == [("get_weather", {"city": "Oslo"})]
    assert pieces > 1


def test_openai_two_calls_at_once_or_one_only(client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "What is the weather in Oslo? And what is the weather in Rome?"}]
    asked: Any = {"model": MODEL, "messages": messages, "tools": TOOLS, "temperature": 0, "max_tokens": 200}
    both = [("get_weather", {"city": "Oslo"}), ("get_weather", {"city": "Rome"})]
    assert calls_of(client.chat.completions.create(**asked).choices[0].message) == both
    assert calls_of(client.chat.completions.create(**asked, parallel_tool_calls=False).choices[0].message) == both[:1]


def test_openai_the_model_answers_where_no_tool_fits(client: OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "temperature": 0, "max_tokens": 60}
    message = client.chat.completions.create(**asked).choices[0].message
    assert (message.content, message.tool_calls) == (ANSWER, None)


def test_openai_parse_finds_the_values(client: OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": PERSON_TOLD, "temperature": 0, "max_tokens": 100}
    assert client.chat.completions.parse(**asked, response_format=Person).choices[0].message.parsed == ADA


def test_langchain_whole_streamed_and_in_batches(chat: ChatOpenAI) -> None:
    assert chat.invoke(PROMPT).content == ANSWER
    assert "".join(str(chunk.content) for chunk in chat.stream(PROMPT)) == ANSWER
    assert [each.content for each in chat.batch([PROMPT, PROMPT])] == [ANSWER, ANSWER]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structured_output(chat: ChatOpenAI, method: Any) -> None:
    assert isinstance(chat.with_structured_output(Paint, method=method).invoke(PROMPT), Paint)


def test_langchain_structured_output_finds_the_values(chat: ChatOpenAI) -> None:
    assert chat.with_structured_output(Person, method="json_schema").invoke(TOLD) == ADA


def test_langchain_bound_tools_by_the_models_choice_and_their_result(chat: ChatOpenAI) -> None:
    bound = chat.bind_tools([get_weather])
    turn = [HumanMessage("What is the weather in Oslo?")]
    answer = bound.invoke(turn)
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Oslo"})
    result = ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"])
    assert bound.invoke([*turn, answer, result]).content == "18 degrees"


def test_langchain_responses_whole_streamed_and_structured(responses: ChatOpenAI) -> None:
    assert responses.invoke(PROMPT).text == ANSWER
    assert "".join(chunk.text for chunk in responses.stream(PROMPT)) == ANSWER
    assert responses.with_structured_output(Person, method="json_schema").invoke(TOLD) == ADA


def test_langchain_responses_by_the_models_choice_and_their_result(responses: ChatOpenAI) -> None:
    bound = responses.bind_tools([get_weather])
    turn = HumanMessage("What is the weather in Oslo?")
    answer = bound.invoke([turn])
    (call,) = answer.tool_calls
    result = ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"])
    assert bound.invoke([turn, answer, result]).text == "18 degrees"


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


@pytest.mark.parametrize("mode", [instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS], ids=str)
def test_instructor(mode: instructor.Mode) -> None:
    client = instructor.from_openai(OpenAI(**WHERE), mode=mode)
    asked: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": TOKENS, "temperature": 0}
    assert isinstance(client.chat.completions.create(**asked, response_model=Paint), Paint)


def test_instructor_in_json_mode_is_not_held_to_the_schema() -> None:
    """It sends ``json_object`` and describes the schema in words, which a shipped model does not understand."""
    client = instructor.from_openai(OpenAI(**WHERE), mode=instructor.Mode.JSON)
    asked: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": TOKENS, "temperature": 0}
    with pytest.raises(InstructorRetryException):
        client.chat.completions.create(**asked, response_model=Paint, max_retries=1)


@pytest.mark.parametrize("kind", [NativeOutput, ToolOutput], ids=["native", "tool"])
def test_pydantic_ai_nested_output_fits_its_schema(agent_model: Any, kind: Any) -> None:
    settings: Any = {"max_tokens": TOKENS, "temperature": 0}
    assert isinstance(
        Agent(agent_model, output_type=kind(Family)).run_sync(TOLD, model_settings=settings).output, Family
    )


def test_pydantic_ai_runs_a_tool_and_tells_its_result(agent_model: Any) -> None:
    settings: Any = {"max_tokens": 200, "temperature": 0}
    agent = Agent(agent_model, tools=[get_weather])
    assert agent.run_sync("What is the weather in Oslo?", model_settings=settings).output == "18 degrees"


def test_llm_whole_streamed_and_with_a_schema(tmp_path: Path) -> None:
    """Its models are told by a file in its folder."""
    served = {"model_id": "served", "model_name": MODEL, "api_base": BASE, "supports_schema": True}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([served]))

    def said(*words: str) -> str:
        command = [Path(sys.executable).with_name("llm"), "-m", "served", "-o", "temperature", "0", *words]
        told = os.environ | {"LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}
        return subprocess.run(
            command, env=told, stdout=subprocess.PIPE, text=True, check=True, timeout=60
        ).stdout.strip()

    assert said(PROMPT) == said("--no-stream", PROMPT) == ANSWER
    assert json.loads(said("--schema", "name, age int", TOLD)) == ADA.model_dump()


@pytest.mark.skipif(not shutil.which("node"), reason="needs Node")
def test_openais_javascript() -> None:
    """``openai_sdk.mjs`` asserts what it gets."""
    told = os.environ | {"OPENAI_BASE_URL": BASE, "OPENAI_API_KEY": "none"}
    script = Path(__file__).with_name("openai_sdk.mjs")
    done = subprocess.run(["node", script], env=told, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
