"""The whole way: client, ingress, NATS, worker with a modelled engine, and back, each in its own process."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from langchain_openai import ChatOpenAI
from millrace.cli.__main__ import main as millrace

from tests.testbed.local_cluster import MODEL, ClusterOptions, LocalCluster

MESSAGES: Any = [{"role": "user", "content": "name five birds"}]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    options = ClusterOptions(folder=tmp_path_factory.mktemp("cluster"), instances=2, speed=2.0)
    with LocalCluster(options) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_stream_and_a_whole_response_say_the_same(client: openai.OpenAI):
    fields: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 40, "temperature": 0}
    whole = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert text
    assert chunks[-1].usage == whole.usage
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_choices_prompts_and_echo_come_in_their_order(client: openai.OpenAI):
    answer = client.completions.create(model=MODEL, prompt=["a", "b"], n=2, max_tokens=5, echo=True, seed=3)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert [c.text[0] for c in answer.choices] == ["a", "a", "b", "b"]
    assert len({c.text for c in answer.choices}) == 4  # each choice has its own seed
    alone = client.completions.create(model=MODEL, prompt="b", n=2, max_tokens=5, echo=True, seed=3)
    assert [c.text for c in alone.choices] == [c.text for c in answer.choices[2:]]


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI):
    fields: Any = {"model": MODEL, "prompt": "tell me", "max_tokens": 64, "extra_body": {"ignore_eos": True}}
    free = client.completions.create(**fields).choices[0].text
    stop = free[10:13]
    stopped = client.completions.create(**fields, stop=[stop]).choices[0]
    assert stopped.text == free[: free.index(stop)]
    assert (stopped.finish_reason, stopped.model_extra["stop_reason"]) == ("stop", stop)


def test_max_tokens_ends_with_length_and_an_end_token_with_stop(client: openai.OpenAI):
    cut = client.completions.create(model=MODEL, prompt="x", max_tokens=3, extra_body={"ignore_eos": True})
    assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 3)
    whole = client.completions.create(model=MODEL, prompt="x", max_tokens=4000)
    assert whole.choices[0].finish_reason == "stop"


async def test_many_streams_at_once_are_each_whole(cluster: LocalCluster):
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:

        async def one(i: int) -> tuple[int, int]:
            stream = await client.completions.create(
                model=MODEL, prompt=f"story {i}", max_tokens=30 + i, stream=True, temperature=0,
                stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
            )  # fmt: skip
            used = 0
            async for chunk in stream:
                used = chunk.usage.completion_tokens if chunk.usage else used
            return i, used

        for i, used in await asyncio.gather(*map(one, range(60))):
            assert used == 30 + i


async def test_langchain_streams(cluster: LocalCluster):
    chat = ChatOpenAI(model=MODEL, base_url=f"{cluster.url}/v1", api_key="none", max_tokens=20, temperature=0)
    streamed = "".join([str(c.content) async for c in chat.astream("hello")])
    assert streamed == (await chat.ainvoke("hello")).content


def metric(cluster: LocalCluster, name: str) -> float:
    """Sum of a metric's samples on the ingress."""
    text = httpx.get(f"{cluster.url}/metrics").text
    values = [float(v) for v in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)]
    assert values, f"no metric {name}"
    return sum(values)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_hangs_up_leaves_nothing_open(cluster: LocalCluster, stream: bool):
    before = metric(cluster, "millrace_http_gone_total") if stream is False else 0.0
    body = {"model": MODEL, "prompt": "x", "max_tokens": 4000, "stream": stream, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=cluster.url, timeout=5) as client:
        if stream:
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    if line:
                        break
        else:
            with pytest.raises(httpx.ReadTimeout):
                await client.post("/v1/completions", json=body, timeout=httpx.Timeout(30, read=0.3))
    until = time.monotonic() + 30
    while metric(cluster, "millrace_http_gone_total") <= before or metric(cluster, "millrace_ingress_sequences_open"):
        assert time.monotonic() < until, "still open"
        await asyncio.sleep(0.05)


def test_a_prompt_past_the_instances_limit_is_refused_by_name(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=[7] * 4096, max_tokens=1)
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")


def test_curl_like_bodies_without_optional_fields_work(cluster: LocalCluster):
    answer = httpx.post(
        f"{cluster.url}/v1/chat/completions", content=json.dumps({"model": MODEL, "messages": MESSAGES})
    )
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"]


def test_the_logs_say_nothing_but_json(cluster: LocalCluster, tmp_path: Path):
    for line in cluster.log("ingress-0").splitlines()[-20:]:
        assert json.loads(line)["level"] in ("info", "warning", "debug"), line


def answered_by(cluster: LocalCluster) -> set[str]:
    """Return the ingresses that answer new connections, by the beginning that each gives its request ids."""
    answers = [httpx.get(f"{cluster.url}/health").headers["x-request-id"] for _ in range(40)]
    return {answer.partition("-")[0] for answer in answers}


def test_ingresses_share_a_port_and_the_others_go_on_when_one_is_killed(tmp_path: Path):
    with LocalCluster(ClusterOptions(folder=tmp_path, ingresses=2, speed=2.0)) as cluster:
        assert len(answered_by(cluster)) == 2
        cluster.processes["ingress-0"].kill()
        cluster.processes["ingress-0"].wait(5)
        assert len(answered_by(cluster)) == 1
        body = {"model": MODEL, "prompt": "x", "max_tokens": 5, "ignore_eos": True}
        for _ in range(5):
            answer = httpx.post(f"{cluster.url}/v1/completions", json=body)
            assert answer.json()["usage"]["completion_tokens"] == 5
        cluster.start_ingress(0)
        cluster.wait_ready()
        until = time.monotonic() + 30
        while len(answered_by(cluster)) < 2:
            assert time.monotonic() < until, "the new process never answered"


def test_a_stopped_ingress_finishes_what_runs_and_ends_by_itself(tmp_path: Path):
    with LocalCluster(ClusterOptions(folder=tmp_path, speed=1.0)) as cluster:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=30) as answer:
            lines = answer.iter_lines()
            next(lines)
            cluster.processes["ingress-0"].terminate()
            rest = list(lines)
        assert rest[-2:] == ["data: [DONE]", ""]
        assert cluster.processes["ingress-0"].wait(10) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{cluster.url}/health")


def test_a_key_has_its_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "keys.toml"
    millrace(["keys", "--file", str(file), "add", "alice", "--requests-per-minute", "2"])
    millrace(["keys", "--file", str(file), "add", "bob"])
    alice, bob = capsys.readouterr().out.split()
    options = ClusterOptions(folder=tmp_path, speed=0.0, ingress={"http": {"keys_file": str(file)}})
    with LocalCluster(options) as cluster:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 2}

        def ask(key: str) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}"}
            return httpx.post(f"{cluster.url}/v1/completions", json=body, headers=headers, timeout=30)

        assert [ask(alice).status_code for _ in range(3)] == [200, 200, 429]
        refused = ask(alice)
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert int(refused.headers["retry-after"]) >= 1
        assert ask(bob).status_code == 200
        assert ask("mr-nobody").status_code == 401
