"""The whole way: client, two ingresses that share a port and host a predictor and a tagger each, NATS, a worker with
modelled engines, and back.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import nats
import openai
import pytest
from millrace.contracts.codec import decode, encode
from millrace.contracts.observers import DecisionMade
from millrace.contracts.predictor import LatencyPrediction, PredictLatency
from millrace.contracts.tagger import LengthTag, TagRequest
from nats.aio.client import Client

from tests.live.clusters import modelled_cluster
from tests.live.faults import kill
from tests.testbed.up_cluster import UpRig
from tests.testbed.waiting import until

MODEL = "m"
#: What a condition is waited for at most, seconds.
PATIENCE_S = 30.0


OPTIONS = ("--ingresses", "2", "--set", "worker.modelled.speed=2", "--set", "telemetry.log_format=json")
rig = modelled_cluster(*OPTIONS, max_model_len=4096)


@pytest.fixture
def client(rig: UpRig) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def bus(rig: UpRig) -> AsyncIterator[Client]:
    client = await rig.operator_bus()
    yield client
    await client.close()


def test_choices_prompts_and_echo_come_in_their_order(client: openai.OpenAI):
    answer = client.completions.create(model=MODEL, prompt=["a", "b"], n=2, max_tokens=5, echo=True, seed=3)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert [c.text[0] for c in answer.choices] == ["a", "a", "b", "b"]
    assert len({c.text for c in answer.choices}) == 4  # each choice has its own seed
    alone = client.completions.create(model=MODEL, prompt="b", n=2, max_tokens=5, echo=True, seed=3)
    assert [c.text for c in alone.choices] == [c.text for c in answer.choices[2:]]


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI):
    fields: Any = {"model": MODEL, "prompt": "tell me", "max_tokens": 64, "extra_body": {"ignore_eos": True}}
    free = client.completions.create(**fields, temperature=0).choices[0].text
    stop = free[10:13]
    stopped = client.completions.create(**fields, temperature=0, stop=[stop]).choices[0]
    assert stopped.text == free[: free.index(stop)]
    assert (stopped.finish_reason, stopped.model_extra["stop_reason"]) == ("stop", stop)


async def serve(rig: UpRig) -> None:
    """One completion over a connection of its own, so that either ingress gets it."""
    async with httpx.AsyncClient(base_url=rig.url, timeout=60) as http:
        body = {"model": MODEL, "prompt": "a story", "max_tokens": 4, "ignore_eos": True}
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text


async def decided(rig: UpRig, bus: Client, count: int) -> list[tuple[str, DecisionMade]]:
    """Decisions about so many requests, as the bus shows them, each with the name of its ingress."""
    heard: list[tuple[str, Any]] = []

    async def hear(message: Any) -> None:
        heard.append((message.headers["Mr-Sender"], decode(message.data)))

    subscription = await bus.subscribe("mr.local.decision.>", cb=hear)
    await bus.flush()
    for _ in range(count):
        await serve(rig)
    await until(lambda: len(heard) >= count)
    await subscription.unsubscribe()
    return heard


async def test_every_placement_is_decided_by_forecasts_of_a_hosted_predictor(rig: UpRig, bus: Client):
    forecasting: set[str] = set()
    async with asyncio.timeout(PATIENCE_S):
        while len(forecasting) < 2:  # each ingress hears snapshots by itself
            found = await decided(rig, bus, 2)
            forecasting |= {s for s, d in found if len(d.forecasts) == 2 and not any(f.note for f in d.forecasts)}
    decisions = [decision for _, decision in await decided(rig, bus, 40)]
    assert not [d for d in decisions if d.fallback]
    assert not [f for d in decisions for f in d.forecasts if f.note]
    assert all(len({f.name for f in d.forecasts}) == 2 for d in decisions)
    assert all(d.expected_output_tokens is not None for d in decisions), "the hosted taggers answered"


async def test_hosted_actors_answer_others_over_the_bus_and_tell_their_figures(rig: UpRig):
    known = rig.cluster_file()
    instance = json.loads(await asyncio.to_thread(rig.cli, "status", "--json"))["instances"][0]["instance"]
    question = PredictLatency(
        request="r", instance=instance, model=MODEL, prompt_tokens=8, max_tokens=8, output_tokens=0
    )
    asked = TagRequest(request="r", model=MODEL, prompt_tokens=8, max_tokens=8)
    ingress = json.loads((rig.folder / "run" / "ingress-0.json").read_text())["bus"]
    client = await nats.connect(
        known["nats_url"], user=ingress["user"], password=ingress["password"], inbox_prefix=f"_INBOX.{ingress['user']}"
    )
    headers = {"Mr-Sender": "test"}
    try:
        answer = await client.request(f"mr.local.predict.{MODEL}.{instance}", encode(question), 5, headers=headers)
        tag = await client.request(f"mr.local.tag.{MODEL}", encode(asked), 5, headers=headers)
    finally:
        await client.close()
    assert isinstance(decode(answer.data), LatencyPrediction)
    assert isinstance(decode(tag.data), LengthTag)
    assert await rig.metric("millrace_predictor_predictions_total") > 0
    assert await rig.metric("millrace_ingress_dispatches_total") > 0


def test_the_apis_port_tells_engines_as_vllms_server_does(rig: UpRig):
    body = {"model": MODEL, "prompt": "a", "max_tokens": 3}
    with httpx.Client(base_url=rig.url) as client:
        assert client.get("/version").json()["version"] == client.get("/version").json()["millrace"]  # no vLLM here
        told = client.post("/v1/completions", json=body, headers={"endpoint-load-metrics-format": "JSON"}).headers
        assert '"kv_cache_usage_perc":' in told["endpoint-load-metrics"]
        assert f'vllm:num_requests_running{{engine="worker-0-0",model_name="{MODEL}"}}' in client.get("/metrics").text


def answered_by(rig: UpRig) -> set[str]:
    """Return the ingresses that answer new connections, by the beginning that each gives its request ids."""
    answers = [httpx.get(f"{rig.url}/health").headers["x-request-id"] for _ in range(40)]
    return {answer.partition("-")[0] for answer in answers}


def test_ingresses_share_a_port(rig: UpRig):
    assert len(answered_by(rig)) == 2


def test_streams_in_the_background_go_on_after_their_ingress_was_killed(rig: UpRig, client: openai.OpenAI):
    fields: Any = {"model": MODEL, "input": "name five birds", "max_output_tokens": 400, "temperature": 0}
    fields |= {"extra_body": {"ignore_eos": True}}
    text = client.responses.create(**fields).output_text
    streams = [client.responses.create(**fields, background=True, stream=True) for _ in range(16)]
    seen = [[next(stream) for _ in range(6)] for stream in streams]
    kill(rig.pids("ingress-0.json")[0])
    client = client.with_options(max_retries=2)  # the SDK's default: its idle connections to the dead one are reset
    for events in seen:
        first: Any = events[0]
        for event in client.responses.retrieve(first.response.id, stream=True, starting_after=5):
            events.append(event)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
        assert client.responses.retrieve(first.response.id).output_text == text


def test_a_stopped_ingress_finishes_what_runs(rig: UpRig):
    body = {"model": MODEL, "prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{rig.url}/v1/completions", json=body, timeout=30) as answer:
        lines = answer.iter_lines()
        next(lines)
        for name in ("ingress-0.json", "ingress-1.json"):
            os.kill(rig.pids(name)[0], signal.SIGTERM)
        rest = list(lines)
    assert rest[-2:] == ["data: [DONE]", ""]
