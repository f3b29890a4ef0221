"""Bad input over a real socket: an OpenAI-shaped answer that names the field, and nothing reaches the core."""

import asyncio
import json
import re
from typing import Any

import httpx
import pytest

from services.ingress.calls.messages import RefusalKind
from tests.live.ingress_rig import MAX_MODEL_LEN, Rig, event_loop_policy  # noqa: F401

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "messages": MESSAGES} | fields).encode()


def complete(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "prompt": "hi"} | fields).encode()


pytestmark = pytest.mark.filterwarnings("ignore:Overriding the:pytest.PytestDeprecationWarning")


#: What is sent, where, and what comes back: status, param, code.
CASES: dict[str, tuple[str, bytes, int, str | None, str | None]] = {
    "an empty body": (CHAT, b"", 400, None, "invalid_json"),
    "half a body": (CHAT, chat()[:-5], 400, None, "invalid_json"),
    "no JSON": (CHAT, b"hello", 400, None, "invalid_json"),
    "something after the JSON": (CHAT, chat() + b" x", 400, None, "invalid_json"),
    "NaN": (CHAT, chat()[:-1] + b',"temperature":NaN}', 400, None, "invalid_json"),
    "an array": (CHAT, b"[]", 400, None, "invalid_type"),
    "bad UTF-8": (
        CHAT, b'{"model":"tiny","messages":[{"role":"user","content":"\xff\xfe"}]}', 400, None, "invalid_utf8",
    ),
    "half a surrogate pair": (
        CHAT, b'{"model":"tiny","messages":[{"role":"user","content":"\\ud800 "}]}', 400, None, "invalid_json",
    ),
    "a very deep body": (
        CHAT, b'{"model":"tiny","messages":[{"role":"user","content":"a"}],"response_format":{"type":"json_schema",'
        b'"json_schema":{"name":"a","schema":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}}}", 400, None, None,
    ),
    "an unknown parameter": (CHAT, chat(nonsense=1), 400, "nonsense", "unknown_parameter"),
    "no model": (CHAT, json.dumps({"messages": MESSAGES}).encode(), 400, "model", "missing_parameter"),
    "an unknown model": (CHAT, chat(model="nobody"), 404, "model", "model_not_found"),
    "no messages": (CHAT, b'{"model":"tiny"}', 400, "messages", "missing_parameter"),
    "empty messages": (CHAT, chat(messages=[]), 400, "messages", "invalid_value"),
    "a message without content": (CHAT, chat(messages=[{"role": "user"}]), 400, "messages[0].content", None),
    "an empty role": (CHAT, chat(messages=[{"role": "", "content": "a"}]), 400, "messages[0].role", None),
    "an image": (
        CHAT, chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]), 400,
        "messages[0].content[0].image_url", "unsupported_parameter",
    ),
    "a text for a number": (CHAT, chat(temperature="hot"), 400, "temperature", "invalid_value"),
    "a temperature past its bound": (CHAT, chat(temperature=3), 400, "temperature", "invalid_value"),
    "a top_p of zero": (CHAT, chat(top_p=0), 400, "top_p", "invalid_value"),
    "a penalty past its bound": (CHAT, chat(presence_penalty=2.5), 400, "presence_penalty", "invalid_value"),
    "n of zero": (CHAT, chat(n=0), 400, "n", "invalid_value"),
    "n past its bound": (CHAT, chat(n=100_000), 400, "n", "invalid_value"),
    "a seed of 80 bits": (CHAT, chat(seed=2**80), 400, "seed", "invalid_value"),
    "max_tokens past the model": (CHAT, chat(max_tokens=MAX_MODEL_LEN), 400, "max_tokens", "context_length_exceeded"),
    "max_completion_tokens past the model": (
        CHAT, chat(max_completion_tokens=10**9), 400, "max_completion_tokens", "context_length_exceeded",
    ),
    "two different bounds": (CHAT, chat(max_tokens=1, max_completion_tokens=2), 400, "max_tokens", None),
    "a prompt longer than the model": (
        CHAT, chat(messages=[{"role": "user", "content": "a" * 5000}]), 400, "messages", "context_length_exceeded",
    ),
    "min_tokens past max_tokens": (CHAT, chat(max_tokens=2, min_tokens=3), 400, "min_tokens", None),
    "five stop strings": (CHAT, chat(stop=["a", "b", "c", "d", "e"]), 400, "stop", None),
    "an empty stop string": (CHAT, chat(stop=""), 400, "stop", None),
    "top_logprobs without logprobs": (CHAT, chat(top_logprobs=2), 400, "top_logprobs", None),
    "too many top_logprobs": (CHAT, chat(logprobs=True, top_logprobs=100), 400, "top_logprobs", None),
    "stream_options without stream": (CHAT, chat(stream_options={"include_usage": True}), 400, "stream_options", None),
    "a bias for no token": (CHAT, chat(logit_bias={"999999": 1}), 400, "logit_bias", None),
    "a bias for a word": (CHAT, chat(logit_bias={"word": 1}), 400, "logit_bias", "invalid_value"),
    "a bias that is no number": (CHAT, chat(logit_bias={"1": 1, "2": "x"}), 400, "logit_bias", "invalid_value"),
    "a list of biases": (CHAT, chat(logit_bias=[1]), 400, "logit_bias", "invalid_value"),
    "a list of metadata": (CHAT, chat(metadata=[None, None]), 400, "metadata", "invalid_value"),
    "a wrong bias twice over": (
        CHAT, chat(logit_bias={"1": "x"})[:-1] + b',"user":"\xff', 400, "logit_bias", "invalid_value",
    ),
    "a bias that a later one replaces": (
        CHAT, chat()[:-1] + b',"logit_bias":{"1":"x","1":1}}', 400, "logit_bias", "invalid_value",
    ),
    "too many biases": (CHAT, chat(logit_bias={str(i): 1 for i in range(2000)}), 400, "logit_bias", None),
    "a seed that overflows with its choices": (CHAT, chat(seed=2**63 - 1, n=2), 400, "seed", None),
    "a stop token that is none": (CHAT, chat(stop_token_ids=[99999]), 400, "stop_token_ids", None),
    "a schema that is none": (
        CHAT, chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "blue"}}}),
        400, "response_format.json_schema.schema", "invalid_json_schema",
    ),
    "no schema": (
        CHAT, chat(response_format={"type": "json_schema"}), 400, "response_format.json_schema", "missing_parameter",
    ),
    "a schema beyond its bound": (
        CHAT,
        chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"a": "b" * 40_000}}}),
        400, "response_format.json_schema.schema", None,
    ),
    "two formats": (
        CHAT, chat(response_format={"type": "json_object"}, structured_outputs={"regex": "a"}), 400,
        "structured_outputs", None,
    ),
    "two constraints": (
        CHAT, chat(structured_outputs={"regex": "a", "choice": ["b"]}), 400, "structured_outputs", None,
    ),
    "tools for a model without": (
        CHAT, chat(tools=[{"type": "function", "function": {"name": "f"}}]), 400, "tools", "unsupported_parameter",
    ),
    "a tool choice without tools": (CHAT, chat(tool_choice="required"), 400, "tool_choice", None),
    "a tool that is not there": (
        CHAT, chat(model="tools", tools=[{"type": "function", "function": {"name": "f"}}],
                   tool_choice={"type": "function", "function": {"name": "g"}}), 400, "tool_choice.function.name", None,
    ),
    "audio": (CHAT, chat(modalities=["audio"]), 400, "modalities", "unsupported_parameter"),
    "storing": (CHAT, chat(store=True), 400, "store", None),
    "prompt for chat": (CHAT, complete(), 400, "prompt", "unsupported_parameter"),
    "an empty prompt": (COMPLETE, complete(prompt=""), 400, "prompt", None),
    "no prompts": (COMPLETE, complete(prompt=[]), 400, "prompt", None),
    "a mixed batch": (COMPLETE, complete(prompt=["a", 1]), 400, "prompt", None),
    "a token that is none": (COMPLETE, complete(prompt=[1, 99999]), 400, "prompt", None),
    "a negative token": (COMPLETE, complete(prompt=[-1]), 400, "prompt[0]", None),
    "messages for completions": (COMPLETE, chat(), 400, "messages", "unknown_parameter"),
    "neither prompt nor messages": ("/tokenize", b'{"model":"tiny"}', 400, "prompt", None),
    "a token beyond the vocabulary": ("/detokenize", b'{"model":"tiny","tokens":[99999]}', 400, "tokens", None),
}  # fmt: skip


async def test_pages_of_allowed_origins_may_call_from_a_browser(rig: Rig, http: httpx.AsyncClient):
    ours, theirs = {"origin": "https://chat.example"}, {"origin": "https://evil.example"}
    asked = await http.options(CHAT, headers=ours | {"access-control-request-method": "POST"})
    assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, "https://chat.example")
    assert "authorization" in asked.headers["access-control-allow-headers"]
    for body in (chat(max_tokens=2, stream=True), chat(max_tokens=2), b"{"):
        answer = await http.post(CHAT, content=body, headers=ours)
        assert answer.headers["access-control-allow-origin"] == "https://chat.example"
        assert "access-control-allow-origin" not in (await http.post(CHAT, content=body, headers=theirs)).headers
    assert (await http.options(CHAT, headers=theirs)).status_code == 405


async def test_bad_bodies_get_an_error_that_names_the_field_and_reach_nobody(rig: Rig, http: httpx.AsyncClient):
    for name, (path, body, status, param, code) in CASES.items():
        answer = await http.post(path, content=body)
        assert answer.status_code == status, (name, answer.text)
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}, name
        assert error["message"], name
        assert (error["type"], error["param"]) == ("invalid_request_error", param), name
        assert code in (None, error["code"]), name
        assert answer.headers["x-request-id"], name
    assert rig.core.calls == []


async def test_what_is_wrong_with_a_value_is_said(rig: Rig, http: httpx.AsyncClient):
    cases = [
        (chat(logit_bias={"7": 1, "word": 1, "other": 1}), "`logit_bias`: word, other are no token ids"),
        (chat(logit_bias={"7": 1, "8": 1000}), "`logit_bias`: Expected `float` <= 100.0"),
        (chat(service_tier="flex"), "'flex' is none of 'auto', 'default'"),
        (chat(truncation_side="up"), "'up' is none of 'left', 'right'"),
        (chat(tool_choice="any"), "'any' is none of 'auto', 'none', 'required'"),
        (chat(response_format={"type": "xml"}), "'xml' is none of 'json_object', 'json_schema', 'text'"),
        (chat(cascade={"stream": "x"}), "'x' is none of 'buffer', 'early_commit'"),
        (chat(store=True), "True is none of False"),
        (b'{"model":"tiny","messages":[{"role":"user","content":"\\\\ud83d', "truncated"),
    ]
    for body, words in cases:
        answer = await http.post(CHAT, content=body)
        assert words in answer.json()["error"]["message"], answer.text


async def test_the_list_of_models_may_have_a_slash_behind_it(rig: Rig, http: httpx.AsyncClient):
    assert (await http.get("/v1/models/")).json() == (await http.get("/v1/models")).json()


async def test_a_body_past_the_limit_is_refused_whether_or_not_it_says_its_length(rig: Rig, http: httpx.AsyncClient):
    async def pieces():
        for _ in range(100):
            yield b"x" * 100_000

    told = await http.post(CHAT, content=b"x" * 10_000_000)
    untold = await http.post(CHAT, content=pieces())
    for answer in (told, untold):
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"
    assert rig.core.calls == []


async def test_a_wrong_method_is_told_the_right_one(rig: Rig, http: httpx.AsyncClient):
    for method, path, allow in (("GET", CHAT, "POST"), ("POST", "/health", "GET"), ("DELETE", "/v1/models", "GET")):
        answer = await http.request(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allow), path
        assert answer.json()["error"]["code"] == "method_not_allowed", path


async def test_an_unknown_path_and_an_unknown_model_card_are_404(rig: Rig, http: httpx.AsyncClient):
    for path in ("/", "/v1", "/v1/audio/speech", "/v1/models/nobody"):
        answer = await http.get(path)
        assert answer.status_code == 404, path
        assert answer.json()["error"]["message"]


async def raw(port: int, data: bytes) -> bytes:
    """Return what a peer without any HTTP library gets until the server ends the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return answer


async def test_bytes_that_are_no_http_get_an_answer_and_the_end(rig: Rig):
    for data, status in (
        (b"\x16\x03\x01\x02\x00\x01\x00", b"400"),  # TLS on the plain port
        (b"GET\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nbad header\r\n\r\n", b"400"),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello", b"400"),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: x\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\nx: " + b"a" * 100_000 + b"\r\n\r\n", b"431"),
    ):
        answer = await raw(rig.port, data)
        assert answer.startswith(b"HTTP/1.1 " + status), data[:80]
        assert b'"error"' in answer


async def test_a_pipeline_is_answered_in_order(rig: Rig):
    requests = b"".join(b"GET %s HTTP/1.1\r\n\r\n" % p for p in (b"/health", b"/version", b"/nope")) * 10
    answer = await raw(rig.port, requests + b"GET /health HTTP/1.0\r\n\r\n")
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200", b"200", b"404"] * 10 + [b"200"]


async def test_an_absolute_url_is_read_as_its_path(rig: Rig):
    answer = await raw(rig.port, b"GET http://somewhere/health?x=1 HTTP/1.0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")


async def test_refusals_of_the_core_become_statuses_with_retry_after(rig: Rig, http: httpx.AsyncClient):
    cases = [
        (RefusalKind.RATE_LIMITED, 3.2, 429, "4"),
        (RefusalKind.CONCURRENCY, 0.0, 429, None),
        (RefusalKind.QUEUE_FULL, 0.5, 503, "1"),
        (RefusalKind.NO_INSTANCE, 0.0, 503, None),
        (RefusalKind.INVALID, 0.0, 400, None),
        (RefusalKind.TIMEOUT, 0.0, 504, None),
    ]
    for kind, retry, status, header in cases:
        rig.core.refuse = (kind, "because", retry)
        for stream in (False, True):
            answer = await http.post(CHAT, content=chat(stream=stream))
            assert (answer.status_code, answer.headers.get("retry-after")) == (status, header)
            assert answer.json()["error"]["message"] == "because"
