"""Clients that people really use: the openai client, LangChain and tools, against the HTTP side."""

import json
from typing import Any

import httpx
import openai
import pytest
from langchain_openai import ChatOpenAI, OpenAI

from tests.live.ingress_rig import Rig, event_loop_policy  # noqa: F401

MESSAGES: Any = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather in a town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}


pytestmark = pytest.mark.filterwarnings("ignore:Overriding the:pytest.PytestDeprecationWarning")


async def test_openai_chat_with_all_its_fields(client: openai.AsyncOpenAI, rig: Rig):
    answer = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=3, n=2, temperature=0.5, top_p=0.9, seed=7, stop=["x"],
        presence_penalty=0.1, frequency_penalty=0.2, logit_bias={"65": 2}, logprobs=True, top_logprobs=1, user="me",
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True, "min_tokens": 1},
    )  # fmt: skip
    assert [c.message.content for c in answer.choices] == ["w0 w1 w2 "] * 2
    assert answer.usage.completion_tokens == 6
    assert answer.choices[0].logprobs.content[0].top_logprobs[0].token == "w0 "
    call = rig.core.calls[0]
    sampling = call.sampling
    assert (call.n, call.stop, sampling.seed, sampling.top_k, sampling.logit_bias) == (2, ["x"], 7, 5, {65: 2.0})
    assert (sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty) == (0.5, 0.9, 0.1, 1.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.logprobs) == (0.1, 0.2, 1)
    assert (sampling.ignore_eos, sampling.min_tokens, sampling.max_tokens) == (True, 1, 3)


async def test_openai_completions_with_a_batch_of_prompts(client: openai.AsyncOpenAI):
    answer = await client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=2, n=2, logprobs=1)
    assert [(c.index, c.text) for c in answer.choices] == [(i, "w0 w1 ") for i in range(4)]
    assert answer.choices[0].logprobs.tokens == ["w0 ", "w1 "]
    tokens = await client.completions.create(model="tiny", prompt=[[1, 2], [3]], max_tokens=1)
    assert tokens.usage.prompt_tokens == 3


async def test_a_batch_of_chats_has_a_choice_for_each(rig: Rig):
    chats = [[{"role": "user", "content": text}] for text in ("one", "two")]
    async with httpx.AsyncClient(base_url=rig.url) as http:
        path, body = "/v1/chat/completions/batch", {"model": "tiny", "messages": chats, "max_tokens": 2}
        answer = (await http.post(path, json=body)).json()
        assert [(c["index"], c["message"]["content"]) for c in answer["choices"]] == [(0, "w0 w1 "), (1, "w0 w1 ")]
        prompts = rig.core.calls[-1].prompts
        assert [answer["usage"]["prompt_tokens"], 2] == [sum(map(len, prompts)), len(prompts)]
        for wrong, param in (
            ({"n": 2}, "n"),
            ({"stream": True}, "stream"),
            ({"messages": chats[0]}, "messages[0]"),
            ({"messages": chats * 40}, "messages"),
        ):
            refused = await http.post(path, json=body | wrong)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_langchain_chat_and_completions_stream_and_not(rig: Rig):
    settings: Any = {"model": "tiny", "base_url": f"{rig.url}/v1", "api_key": "none", "max_tokens": 3}
    chat = ChatOpenAI(**settings, temperature=0)
    assert (await chat.ainvoke("hi")).content == "w0 w1 w2 "
    assert "".join([str(c.content) async for c in chat.astream("hi")]) == "w0 w1 w2 "
    plain = OpenAI(**settings)
    assert await plain.ainvoke("hi") == "w0 w1 w2 "
    assert "".join([c async for c in plain.astream("hi")]) == "w0 w1 w2 "


async def whole_calls(stream: Any) -> tuple[list[tuple[str, str]], str, str]:
    """Names and arguments of streamed calls, put together; the text; the finish reason."""
    calls: dict[int, list[str]] = {}
    text, finish = "", ""
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
            for call in choice.delta.tool_calls or []:
                entry = calls.setdefault(call.index, ["", ""])
                entry[0] += call.function.name or ""
                entry[1] += call.function.arguments or ""
    return [(name, arguments) for name, arguments in calls.values()], text, finish


TOOL_CASES: list[tuple[str, Any, str, list[tuple[str, Any]], str, str]] = [
    ("a named function", {"type": "function", "function": {"name": "weather"}}, '{"town":"Köln"}',
     [("weather", {"town": "Köln"})], "", "length"),
    ("required", "required", '[{"name":"weather","parameters":{"town":"A"}},{"name":"weather","parameters":{}}]',
     [("weather", {"town": "A"}), ("weather", {})], "", "length"),
    ("auto", "auto", 'Let me see. <tool_call>{"name": "weather", "arguments": {"town": "B"}}</tool_call>',
     [("weather", {"town": "B"})], "Let me see.", "length"),
    ("auto without a call", "auto", "No <tool is needed", [], "No <tool is needed", "length"),
    ("auto with half a call", "auto", 'x <tool_call>{"name"', [], 'x <tool_call>{"name"', "length"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "choice", "said", "calls", "text", "finish"), TOOL_CASES, ids=[c[0] for c in TOOL_CASES]
)
async def test_tool_calls_whole_and_streamed(
    client: openai.AsyncOpenAI, rig: Rig, name: str, choice: Any, said: str, calls: Any, text: str, finish: str
):
    rig.core.say(said)
    fields: Any = {"model": "tools", "messages": MESSAGES, "tools": [WEATHER], "tool_choice": choice}
    fields["max_tokens"] = len(said)
    answer = (await client.chat.completions.create(**fields)).choices[0]
    got = [(c.function.name, json.loads(c.function.arguments)) for c in answer.message.tool_calls or []]
    assert (got, answer.message.content or "", answer.finish_reason) == (calls, text, finish)
    streamed, shown, end = await whole_calls(await client.chat.completions.create(**fields, stream=True))
    assert ([(n, json.loads(a)) for n, a in streamed], shown.strip(), end) == (calls, text, finish)
    constrained = rig.core.calls[0].sampling.structured
    assert (constrained is not None) == (choice != "auto")


async def test_a_conversation_with_earlier_calls_and_their_answers_is_rendered(client: openai.AsyncOpenAI, rig: Rig):
    said: Any = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"town":"A"}'}}
    conversation: Any = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [said]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    await client.chat.completions.create(
        model="tools", messages=conversation, tools=[WEATHER], tool_choice="none", max_tokens=1
    )
    assert '"name": "weather"' in rig.core.calls[0].prompt_head
    assert "<|tool|>rain" in rig.core.calls[0].prompt_head
