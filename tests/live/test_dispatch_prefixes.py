"""Placing by prefix with real processes: a conversation's further turns go where the earlier ones were."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import nats
import pytest
from millrace.contracts.codec import decode
from millrace.contracts.observers import DecisionMade, RequestFinished

from tests.testbed.local_cluster import MODEL, ClusterOptions, LocalCluster

PATIENCE_S = 20.0
DISPATCH = {"policy": "forecast", "parameters": {"deadline_ms": 500, "pause_s": 0.3}}
CONVERSATIONS, TURNS = 4, 3
#: Some two thousand tokens: half a second of modelled time where they are not cached.
OPENING = "once there was a mill by the river, and nobody knew who had built it. " * 35


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("prefixes")
    options = ClusterOptions(folder=folder, workers=2, predictors=1, ingress={"dispatch": DISPATCH})
    with LocalCluster(options) as cluster:
        yield cluster


class Listener:
    """Decisions and outcomes by request."""

    def __init__(self) -> None:
        self.decisions: dict[str, DecisionMade] = {}
        self.outcomes: dict[str, RequestFinished] = {}

    async def hear(self, message: Any) -> None:
        body = decode(message.data)
        if isinstance(body, DecisionMade):
            self.decisions[body.request] = body
        elif isinstance(body, RequestFinished):
            self.outcomes[body.request] = body

    async def both(self, request: str) -> tuple[DecisionMade, RequestFinished]:
        """Return the decision on a request and its outcome."""
        until_s = time.monotonic() + PATIENCE_S
        while request not in self.decisions or request not in self.outcomes:
            assert time.monotonic() < until_s, f"nothing was heard of {request}"
            await asyncio.sleep(0.02)
        return self.decisions[request], self.outcomes[request]


@asynccontextmanager
async def listening(cluster: LocalCluster) -> AsyncIterator[Listener]:
    listener = Listener()
    client = await nats.connect(cluster.bus["servers"][0])
    try:
        for subject in ("decision", "outcome"):
            await client.subscribe(f"mr.bench.{subject}.>", cb=listener.hear)
        await client.flush()
        yield listener
    finally:
        await client.close()


async def serve(client: httpx.AsyncClient, prompt: str) -> tuple[str, str, int]:
    """The request's id, the prompt with the answer behind it, and how many tokens the API says were cached."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    cached = int(told["usage"]["prompt_tokens_details"]["cached_tokens"])
    return str(told["id"]).removeprefix("cmpl-"), prompt + told["choices"][0]["text"], cached


async def test_further_turns_go_where_the_conversation_is_cached(cluster: LocalCluster) -> None:
    async with listening(cluster) as listener, httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        await _predicting(client, listener)
        openings = [f"{number}: {OPENING}" for number in range(CONVERSATIONS)]
        told = await asyncio.gather(*(serve(client, opening) for opening in openings))
        places = [(await listener.both(request))[0].chosen for request, _, _ in told]
        assert set(places) == {"worker-0", "worker-1"}, "at the same time, they are too much for one"
        texts = [text for _, text, _ in told]
        judged = 0
        for _ in range(TURNS - 1):
            for number in range(CONVERSATIONS):
                request, texts[number], cached = await serve(client, texts[number] + " and then? ")
                decision, outcome = await listener.both(request)
                if decision.fallback:  # on a loaded machine a deadline may pass
                    places[number] = decision.chosen
                    continue
                judged += 1
                assert decision.chosen == places[number], decision.forecasts
                assert cached == outcome.cached_tokens > 0.9 * outcome.prompt_tokens
                assert outcome.predicted_cached_tokens == outcome.cached_tokens
        assert judged >= CONVERSATIONS


async def _predicting(client: httpx.AsyncClient, listener: Listener) -> None:
    """Waits until a placement was decided by the predictions of both instances."""
    until_s = time.monotonic() + PATIENCE_S
    while True:
        decision, _ = await listener.both((await serve(client, "who?"))[0])
        if len(decision.forecasts) == 2 and not any(forecast.note for forecast in decision.forecasts):
            return
        assert time.monotonic() < until_s, decision
