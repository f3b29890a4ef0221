"""Streams over a real socket: their events, clients that hang up or do not read, keys, ids, slow uploads."""

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from millrace.cli.__main__ import main as millrace
from millrace.http.exchange import Exchange, HttpRequest

from services.ingress.api.parsed_requests import parse_completion_request
from services.ingress.api.tokenizer import LOOP_CHARACTERS_MAX
from services.ingress.calls.messages import RefusalKind, RefuseCall
from services.ingress.http.keys import ANYBODY, ApiKeyStore
from tests.live.ingress_rig import LIMITS, Rig, event_loop_policy, served  # noqa: F401
from tests.testbed.waiting import until

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": True} | fields


pytestmark = pytest.mark.filterwarnings("ignore:Overriding the:pytest.PytestDeprecationWarning")


async def events(rig: Rig, path: str, body: dict[str, Any]) -> list[Any]:
    """Events of a stream, parsed; the end as the string [DONE]."""
    async with httpx.AsyncClient(base_url=rig.url) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


async def test_a_chat_stream_is_role_then_content_then_finish_then_done(rig: Rig):
    got = await events(rig, CHAT, chat())
    assert got[-1] == "[DONE]"
    choices = [e["choices"][0] for e in got[:-1]]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["delta"].get("content") for c in choices[1:]] == ["w0 ", "w1 ", "w2 ", "w3 "]
    assert [c["finish_reason"] for c in choices] == [None] * 4 + ["length"]
    assert {e["object"] for e in got[:-1]} == {"chat.completion.chunk"}
    assert len({(e["id"], e["created"], e["model"]) for e in got[:-1]}) == 1
    assert all("usage" not in e for e in got[:-1])


async def test_continuous_usage_counts_up(rig: Rig):
    options = {"include_usage": True, "continuous_usage_stats": True}
    got = await events(rig, COMPLETE, {"model": "tiny", "prompt": "hi", "max_tokens": 3, "stream": True,
                                       "stream_options": options})  # fmt: skip
    assert [e["usage"]["completion_tokens"] for e in got[:-1]] == [1, 2, 3, 3]


async def test_a_stream_whose_tokens_say_nothing_gets_a_comment_each_five_seconds(rig: Rig):
    said: list[int] = []
    rig.core.words = lambda call, i: said.append(i) or ("" if i < 12 else "w ")
    rig.core.pace_s = 0.01
    async with (
        httpx.AsyncClient(base_url=rig.url) as client,
        client.stream("POST", CHAT, json=chat(max_tokens=14)) as answer,
    ):
        lines = answer.aiter_lines()
        assert "assistant" in await anext(lines)
        for looks, now_s in enumerate((0.0, 0.5, 4.0, 4.5, 5.0, 9.0, 9.5)):
            await until(lambda looks=looks: len(said) > looks)
            rig.calls.keep_alive(now_s)
        text = "\n".join([line async for line in lines])
    assert text.count(": keep-alive") == 2  # at 4 and 9 s: less than five after what was written since the look before
    assert text.rstrip().endswith("data: [DONE]")


async def test_a_call_that_no_instance_has_taken_is_not_opened(rig: Rig, http: httpx.AsyncClient):
    rig.core.waits = True
    asking = asyncio.create_task(http.post(CHAT, json=chat()))
    await until(lambda: rig.core.calls)
    for now_s in (0.0, 60.0):
        rig.calls.keep_alive(now_s)
    refused = RefuseCall(request=rig.core.calls[0].request, kind=RefusalKind.NO_INSTANCE, detail="none")
    rig.core.handlers[RefuseCall](refused)
    assert (await asking).status_code == 503


async def test_a_failure_in_the_middle_is_an_error_event_and_the_end_without_done(rig: Rig, http: httpx.AsyncClient):
    rig.core.fail_after = 2
    got = await events(rig, CHAT, chat())
    assert got[-1]["error"]["code"] == "continuation_failed"
    assert "[DONE]" not in got
    whole = await http.post(CHAT, json=chat(stream=False))
    assert (whole.status_code, whole.json()["error"]["code"]) == (503, "continuation_failed")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_hangs_up_ends_its_call(rig: Rig, http: httpx.AsyncClient, stream: bool):
    rig.core.pace_s = 0.01
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    body = json.dumps(chat(stream=stream, max_tokens=2000)).encode()
    writer.write(b"POST %s HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (CHAT.encode(), len(body), body))
    if stream:
        await reader.readuntil(b"w1 ")
    else:
        await until(lambda: rig.core.calls)
    writer.close()
    await until(lambda: rig.core.abandoned)
    assert (rig.core.abandoned[0].request, rig.core.abandoned[0].reason) == (rig.core.calls[0].request, "client_gone")
    assert 'millrace_http_gone_total{reason="client_gone"} 1.0' in (await http.get("/metrics")).text


async def slow_stream(rig: Rig) -> socket.socket:
    """A stream of large words that nobody reads, over a connection with a small receive buffer."""
    rig.core.words = lambda call, i: "x" * 20_000
    rig.core.pace_s = 0.001
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", rig.port))
    body = json.dumps(chat(max_tokens=2000)).encode()
    request = b"POST %s HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (CHAT.encode(), len(body), body)
    await asyncio.get_running_loop().sock_sendall(sock, request)
    return sock


@pytest.mark.parametrize(
    "bounds",
    [{"buffer_bytes_max": 200_000}, {"buffer_bytes_max": 60_000_000, "slow_reader_s": 0.3}],
    ids=["full", "late"],
)
async def test_a_reader_that_lets_too_much_wait_or_for_too_long_is_cut(tmp_path: Path, bounds: dict[str, Any]):
    async with served(tmp_path, limits=msgspec.structs.replace(LIMITS, **bounds)) as rig:
        sock = await slow_stream(rig)
        await until(lambda: rig.core.abandoned)
        assert rig.core.abandoned[0].reason == "slow_reader"
        sock.close()


async def test_a_request_that_comes_too_slowly_is_answered_408(tmp_path: Path):
    async with served(tmp_path, limits=msgspec.structs.replace(LIMITS, read_s=0.2)) as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 100\r\n\r\n{")
        assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.1 408")
        writer.close()


async def test_an_idle_connection_is_closed(tmp_path: Path):
    async with served(tmp_path, limits=msgspec.structs.replace(LIMITS, idle_s=0.2)) as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()


async def test_a_client_that_waits_for_continue_is_told_to_go_on(rig: Rig):
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    body = json.dumps(chat(stream=False)).encode()
    writer.write(b"POST %s HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: %d\r\n\r\n" % (CHAT.encode(), len(body)))
    assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5) == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 200")
    writer.close()


async def test_an_old_client_gets_a_stream_that_ends_with_its_connection(rig: Rig):
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    body = json.dumps(chat()).encode()
    writer.write(b"POST %s HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (CHAT.encode(), len(body), body))
    answer = await asyncio.wait_for(reader.read(), 5)
    assert b"transfer-encoding" not in answer
    assert answer.endswith(b"data: [DONE]\n\n")
    writer.close()


async def test_a_long_prompt_is_tokenised_off_the_loop_with_the_same_result(rig: Rig, http: httpx.AsyncClient):
    body = {"model": "tiny", "prompt": ["ab" * 900] * 40, "max_tokens": 1}
    assert (await http.post(COMPLETE, json=body)).status_code == 200
    assert [len(p) for p in rig.core.calls[0].prompts] == [1800] * 40
    too_long = {"model": "tiny", "prompt": ["ab" * 12_000] * 3, "max_tokens": 1}
    answer = await http.post(COMPLETE, json=too_long)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "24000 tokens" in answer.json()["error"]["message"]


async def test_a_prompt_that_cannot_fit_is_refused_without_tokenising(rig: Rig, http: httpx.AsyncClient):
    answer = await http.post(COMPLETE, json={"model": "tiny", "prompt": "a" * 3_000_000, "max_tokens": 1})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "at least" in answer.json()["error"]["message"]


async def test_a_bug_while_a_long_prompt_is_tokenised_is_a_500_and_nobody_waits_for_ever(rig: Rig):
    class Broken:
        """A text that breaks the tokeniser: it is no string."""

        def __len__(self) -> int:
            return 1_000

    class Bodiless(Exchange):
        """Keeps its answer."""

        status = 0

        def respond(self, status: int, *rest: Any, **named: Any) -> None:
            self.status = status

    request = HttpRequest(method="POST", path=COMPLETE, headers={}, body=b"", keep_alive=True, chunked=True)
    exchange = Bodiless(request, None)  # type: ignore[arg-type]
    body = json.dumps({"model": "tiny", "prompt": "x"}).encode()
    parsed = parse_completion_request(body, rig.models)
    rig.calls.submit(
        exchange,
        COMPLETE,
        msgspec.structs.replace(parsed, texts=[Broken()] * (LOOP_CHARACTERS_MAX // 1_000 + 1)),
        ANYBODY,
    )
    await until(lambda: exchange.status)
    assert (exchange.status, [type(bug) for bug in rig.bugs]) == (500, [TypeError])
    rig.bugs.clear()


async def test_the_clients_request_id_comes_back_where_it_is_sane(rig: Rig, http: httpx.AsyncClient):
    for sent, kept in (("abc-1", True), ("x" * 500, False), ("a b", False)):
        answer = await http.post(CHAT, json=chat(stream=False), headers={"x-request-id": sent})
        assert (answer.headers["x-request-id"] == sent) is kept


async def test_a_clients_trace_goes_on_and_keeps_its_sampling(rig: Rig, http: httpx.AsyncClient):
    theirs = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await http.post(CHAT, json=chat(), headers={"traceparent": theirs})
    await http.post(CHAT, json=chat(), headers={"traceparent": "nonsense"})
    first, second = rig.core.calls
    assert first.traceparent.startswith("00-0af7651916cd43dd8448eb211c80319c-")
    assert first.traceparent.endswith("-01")
    assert first.parent_span_id == "b7ad6b7169203331"
    assert second.parent_span_id == ""


async def test_keys_made_by_the_command_open_the_door_and_carry_their_limits(tmp_path: Path, capsys):
    file = tmp_path / "keys.toml"
    assert millrace(["keys", "--file", str(file), "add", "alice", "--requests-per-minute", "60"]) == 0
    key = capsys.readouterr().out.strip()
    assert key not in file.read_text()
    async with served(tmp_path, keys=ApiKeyStore(file)) as rig, httpx.AsyncClient(base_url=rig.url) as client:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": key}):
            answer = await client.post(CHAT, json=chat(), headers=headers)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert rig.core.calls == []
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/health")).status_code == 200
        answer = await client.post(CHAT, json=chat(), headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 200
        assert (rig.core.calls[0].key, rig.core.calls[0].limits.requests_per_minute) == ("alice", 60)


async def test_metrics_ask_for_a_key_once_one_has_the_right_to_read_them(tmp_path: Path, capsys):
    file = tmp_path / "keys.toml"
    millrace(["keys", "--file", str(file), "add", "ben"])
    ben = capsys.readouterr().out.strip()
    store = ApiKeyStore(file)
    async with served(tmp_path, keys=store) as rig, httpx.AsyncClient(base_url=rig.url) as client:
        assert (await client.get("/metrics")).status_code == 200  # as vLLM's
        millrace(["keys", "--file", str(file), "add", "prometheus", "--metrics"])
        prometheus = capsys.readouterr().out.strip()
        store.refresh()
        assert (await client.get("/metrics")).status_code == 401
        for key, status in ((ben, 403), (prometheus, 200)):
            answer = await client.get("/metrics", headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == status
        assert (await client.get("/health")).status_code == 200
    millrace(["keys", "--file", str(file), "list"])
    assert capsys.readouterr().out.splitlines() == ["ben  no limits", "prometheus  may read /metrics"]


def test_a_changed_key_file_is_read_again_and_a_broken_one_changes_nothing(tmp_path: Path, capsys):
    file = tmp_path / "keys.toml"
    millrace(["keys", "--file", str(file), "add", "alice"])
    alice = capsys.readouterr().out.strip().encode()
    store = ApiKeyStore(file)
    millrace(["keys", "--file", str(file), "add", "bob"])
    bob = capsys.readouterr().out.strip().encode()
    assert store.lookup(bob) is None
    assert store.refresh() == ""
    assert store.lookup(bob).name == "bob"
    file.write_text("keys = 7")
    assert "keys.toml" in store.refresh()
    assert store.lookup(alice).name == "alice"


async def test_ready_waits_for_an_instance_of_every_model(rig: Rig, http: httpx.AsyncClient):
    assert (await http.get("/ready")).status_code == 200
    rig.instances["tools"] = 0
    answer = await http.get("/ready")
    assert (answer.status_code, answer.json()["models_without_instance"]) == (503, ["tools"])
