"""An ingress that hosts its predictor and tagger: the same decisions, and they answer the bus as well."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import nats
import pytest
from millrace.contracts.codec import decode, encode
from millrace.contracts.observers import DecisionMade
from millrace.contracts.predictor import LatencyPrediction, PredictLatency
from millrace.contracts.tagger import LengthTag, TagRequest
from nats.aio.client import Client

from tests.testbed.local_cluster import MODEL, ClusterOptions, LocalCluster

#: What a condition is waited for at most, seconds.
PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    options = ClusterOptions(folder=tmp_path_factory.mktemp("hosted"), workers=2, ingresses=2, hosting=True)
    with LocalCluster(options) as cluster:
        yield cluster


@pytest.fixture
async def client(cluster: LocalCluster) -> AsyncIterator[Client]:
    client = await nats.connect(cluster.bus["servers"][0])
    yield client
    await client.close()


async def serve(cluster: LocalCluster) -> None:
    """One completion over a connection of its own, so that either ingress gets it."""
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as http:
        body = {"model": MODEL, "prompt": "a story", "max_tokens": 4, "ignore_eos": True}
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text


async def decided(cluster: LocalCluster, client: Client, count: int) -> list[tuple[str, DecisionMade]]:
    """Decisions about so many requests, as the bus shows them, each with the name of its ingress."""
    heard: list[tuple[str, Any]] = []

    async def hear(message: Any) -> None:
        heard.append((message.headers["Mr-Sender"], decode(message.data)))

    subscription = await client.subscribe("mr.bench.decision.>", cb=hear)
    await client.flush()
    for _ in range(count):
        await serve(cluster)
    until_s = time.monotonic() + PATIENCE_S
    while len(heard) < count:
        assert time.monotonic() < until_s, f"{len(heard)} of {count}"
        await asyncio.sleep(0.02)
    await subscription.unsubscribe()
    return heard


def _missing(decision: DecisionMade) -> bool:
    """Whether an instance was not forecast."""
    return bool(decision.fallback) or len(decision.forecasts) < 2 or any(each.note for each in decision.forecasts)


async def test_every_placement_is_decided_by_forecasts_that_the_bus_shows(cluster: LocalCluster, client: Client):
    until_s = time.monotonic() + PATIENCE_S
    forecasting: set[str] = set()
    while len(forecasting) < cluster.options.ingresses:  # each hears snapshots by itself
        assert time.monotonic() < until_s, f"only {forecasting} have heard snapshots"
        forecasting |= {sender for sender, d in await decided(cluster, client, 2) if not _missing(d)}
    decisions = [decision for _, decision in await decided(cluster, client, 40)]
    assert not [d for d in decisions if d.fallback]
    assert all({f.name for f in d.forecasts} == {"worker-0", "worker-1"} for d in decisions)
    assert not [f for d in decisions for f in d.forecasts if f.note]
    assert all(d.expected_output_tokens is not None for d in decisions), "the hosted taggers answered"


async def test_hosted_actors_answer_others_over_the_bus(cluster: LocalCluster, client: Client):
    headers = {"Mr-Sender": "test"}
    question = PredictLatency(
        request="r", instance="worker-0", model=MODEL, prompt_tokens=8, max_tokens=8, output_tokens=0
    )
    answer = await client.request(f"mr.bench.predict.{MODEL}.worker-0", encode(question), timeout=5, headers=headers)
    assert isinstance(decode(answer.data), LatencyPrediction)
    asked = TagRequest(request="r", model=MODEL, prompt_tokens=8, max_tokens=8)
    tag = await client.request(f"mr.bench.tag.{MODEL}", encode(asked), timeout=5, headers=headers)
    assert isinstance(decode(tag.data), LengthTag)


async def test_metrics_of_hosted_actors_stand_beside_their_ingresss(cluster: LocalCluster):
    async with httpx.AsyncClient(base_url=cluster.url) as http:
        text = (await http.get("/metrics")).text
    assert "millrace_predictor_predictions_total" in text
    assert "millrace_ingress_dispatches_total" in text
