"""Dispatch by forecast with real processes: unequal engines, a predictor that stands still, the explanation."""

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import nats
from millrace.contracts.codec import decode
from millrace.contracts.observers import DecisionMade, RequestFinished
from millrace.contracts.subjects import Subjects

from tests.live.clusters import modelled_cluster
from tests.live.faults import shown
from tests.testbed.up_cluster import UpRig

#: What a condition is waited for at most, seconds.
PATIENCE_S = 20.0
DISPATCH = {"deadline_ms": 200, "pause_s": 0.3}


#: A predictor in a process of its own. The second engine is four times as slow, which it must see.
OPTIONS = (
    *("--processes", "2", "--set", "services.hosted_instances_max=0", "--set", "telemetry.trace_sample=1"),
    *("--set", "policies.dispatch.parameters=" + json.dumps(DISPATCH), "--set", "worker-1.modelled.speed=0.25"),
)
rig = modelled_cluster(*OPTIONS, max_model_len=4096)


class Listener:
    """Decisions and outcomes from now on."""

    def __init__(self) -> None:
        self.decisions: list[DecisionMade] = []
        self.outcomes: list[RequestFinished] = []

    async def hear(self, message: Any) -> None:
        body = decode(message.data)
        if isinstance(body, DecisionMade):
            self.decisions.append(body)
        elif isinstance(body, RequestFinished):
            self.outcomes.append(body)

    async def of(self, requests: list[str]) -> tuple[list[DecisionMade], list[RequestFinished]]:
        """Return the first decision and the outcome of each of these requests."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                decisions = {each.request: each for each in reversed(self.decisions)}
                outcomes = {each.request: each for each in self.outcomes}
                if all(request in decisions and request in outcomes for request in requests):
                    return [decisions[request] for request in requests], [outcomes[request] for request in requests]
                await asyncio.sleep(0.02)


@asynccontextmanager
async def listening(rig: UpRig) -> AsyncIterator[Listener]:
    known = rig.connection()
    listener, subjects = Listener(), Subjects(known.cluster)
    client = await nats.connect(
        known.url, user=known.user, password=known.password, inbox_prefix=f"_INBOX.{known.user}"
    )
    try:
        for kind in ("decision", "outcome"):
            await client.subscribe(f"{subjects.prefix}.{kind}.>", cb=listener.hear)
        await client.flush()
        yield listener
    finally:
        await client.close()


async def serve(http: httpx.AsyncClient) -> str:
    """The id of a request that was answered."""
    body = {"model": "m", "prompt": "a story", "max_tokens": 40, "ignore_eos": True}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 40
    return str(answer.json()["id"]).removeprefix("cmpl-")


async def serve_many(rig: UpRig, count: int) -> list[str]:
    """As many, one every 20 ms; returns their ids."""
    async with httpx.AsyncClient(base_url=rig.url, timeout=60) as http:
        tasks = []
        for _ in range(count):
            tasks.append(asyncio.create_task(serve(http)))
            await asyncio.sleep(0.02)
        return [await task for task in tasks]


async def predicting(rig: UpRig, listener: Listener) -> str:
    """Waits until a placement was decided by the predictions of both instances; the request that was placed so."""
    until_s = time.monotonic() + PATIENCE_S
    while True:
        requests = await serve_many(rig, 1)
        ((decision,), _) = await listener.of(requests)
        if len(decision.forecasts) == 2 and not any(forecast.note for forecast in decision.forecasts):
            return requests[0]
        assert time.monotonic() < until_s, decision


async def test_the_faster_engine_gets_more_and_predictions_are_joined_with_what_happened(rig: UpRig) -> None:
    async with listening(rig) as listener:
        await predicting(rig, listener)
        await serve_many(rig, 30)  # the predictor sees how fast they are
        decisions, outcomes = await listener.of(await serve_many(rig, 60))
    shares = Counter(decision.chosen for decision in decisions)
    assert shares["worker-0"] > 2 * shares["worker-1"], shares
    by_forecast = [decision for decision in decisions if not decision.fallback]
    assert len(by_forecast) > 20, "a loaded machine may miss a deadline"
    assert all(d.wall_us > 0 and d.prompt_tokens > 0 and d.max_tokens == 40 for d in by_forecast)
    assert sum(outcome.predicted_e2e_ns is not None for outcome in outcomes) >= len(by_forecast)
    assert all(outcome.placed_ns >= outcome.arrival_ns for outcome in outcomes)


async def test_the_explanation_says_what_was_predicted_and_what_happened(rig: UpRig) -> None:
    async with listening(rig) as listener:
        request = await predicting(rig, listener)
    text = await shown(rig, "explain", request, "what happened: completed")
    assert "by forecast: lowest of 2" in text
    assert "→ worker-" in text
    assert "end to end" in text


async def test_a_predictor_that_stands_still_costs_deadlines_and_no_request_and_is_asked_again(rig: UpRig) -> None:
    (pid,) = rig.pids("predictor-0.json")
    async with listening(rig) as listener:
        await predicting(rig, listener)
        os.kill(pid, signal.SIGSTOP)
        try:
            decisions, _ = await listener.of(await serve_many(rig, 30))
        finally:
            os.kill(pid, signal.SIGCONT)
        assert {decision.fallback for decision in decisions} == {"join_shortest_queue"}
        assert any("no answer in time" in decision.reason for decision in decisions)
        assert any("predictors were silent" in decision.reason for decision in decisions), "they are left alone a while"
        await predicting(rig, listener)
    events = [line for line in (rig.folder / "logs" / "ingress-0.log").read_text().splitlines() if "forecasts_" in line]
    assert [("missing" in line, "back" in line) for line in events[-2:]] == [(True, False), (False, True)], events
    assert await rig.metric('millrace_ingress_forecast_error_ratio_count{of="e2e"}') > 0
    assert await rig.metric('millrace_ingress_fallbacks_total{reason="paused"}') > 0
