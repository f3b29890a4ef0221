"""Dispatch by forecast with real processes: unequal engines, a predictor that dies and comes back, the explanation."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import nats
import pytest
from millrace.cli.__main__ import main as millrace
from millrace.contracts.codec import decode
from millrace.contracts.observers import DecisionMade, RequestFinished

from tests.testbed.local_cluster import MODEL, ClusterOptions, LocalCluster

#: How much faster than modelled time each worker's engine runs: the first is four times the second.
SPEEDS = (1.0, 0.25)
#: What a condition is waited for at most, seconds.
PATIENCE_S = 20.0
DISPATCH = {"policy": "forecast", "parameters": {"deadline_ms": 200, "pause_s": 0.3}}


class UnequalCluster(LocalCluster):
    """Two workers whose engines differ in speed; the predictors are told nothing of it and must see it."""

    def start_worker(self, index: int) -> None:
        options = self.options
        modelled = options.modelled | {"speed": SPEEDS[index]}
        self.options = msgspec.structs.replace(options, modelled=modelled)
        super().start_worker(index)
        self.options = options


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UnequalCluster]:
    folder = tmp_path_factory.mktemp("forecast")
    telemetry = {"log_format": "json", "trace_dir": str(folder / "traces"), "trace_sample": 1.0}
    ingress = {"dispatch": DISPATCH, "telemetry": telemetry}
    options = ClusterOptions(folder=folder, workers=len(SPEEDS), predictors=1, ingress=ingress)
    with UnequalCluster(options) as cluster:
        yield cluster


@asynccontextmanager
async def told(cluster: LocalCluster) -> AsyncIterator[list[Any]]:
    """Every decision and outcome from now on."""
    heard: list[Any] = []

    async def hear(message: Any) -> None:
        heard.append(decode(message.data))

    client = await nats.connect(cluster.bus["servers"][0])
    try:
        for subject in ("decision", "outcome"):
            await client.subscribe(f"mr.bench.{subject}.>", cb=hear)
        await client.flush()
        yield heard
    finally:
        await client.close()


async def serve(client: httpx.AsyncClient, tokens: int = 40) -> str:
    """One completion of so many tokens; the request's id."""
    body = {"model": MODEL, "prompt": "a story", "max_tokens": tokens, "ignore_eos": True}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == tokens
    return str(answer.json()["id"])


async def serve_many(cluster: LocalCluster, count: int, *, gap_s: float) -> list[str]:
    """As many, one every ``gap_s``."""
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        tasks = []
        for _ in range(count):
            tasks.append(asyncio.ensure_future(serve(client)))
            await asyncio.sleep(gap_s)
        return await asyncio.gather(*tasks)


def of_kind(heard: list[Any], kind: type[Any]) -> list[Any]:
    return [body for body in heard if isinstance(body, kind)]


async def heard_all(heard: list[Any], kind: type[Any], count: int) -> list[Any]:
    """Waits for so many."""
    until_s = time.monotonic() + PATIENCE_S
    while len(of_kind(heard, kind)) < count:
        assert time.monotonic() < until_s, f"{len(of_kind(heard, kind))} of {count} {kind.__name__}"
        await asyncio.sleep(0.02)
    return of_kind(heard, kind)


async def predicting(cluster: LocalCluster) -> str:
    """Waits until a placement was decided by the predictions of both instances; the request that was placed so."""
    until_s = time.monotonic() + PATIENCE_S
    async with told(cluster) as heard:
        while True:
            for decision in of_kind(heard, DecisionMade):
                if decision.forecasts and not any(forecast.note for forecast in decision.forecasts):
                    return str(decision.request)
            assert time.monotonic() < until_s, heard[-1:]
            await serve_many(cluster, 1, gap_s=0.0)


async def test_the_faster_engine_gets_more_and_predictions_are_joined_with_what_happened(cluster: UnequalCluster):
    await predicting(cluster)
    await serve_many(cluster, 30, gap_s=0.02)  # the predictor sees how fast they are
    async with told(cluster) as heard:
        await serve_many(cluster, 60, gap_s=0.02)
        decisions = await heard_all(heard, DecisionMade, 60)
        outcomes = await heard_all(heard, RequestFinished, 60)
    shares = Counter(d.chosen for d in decisions)
    assert shares["worker-0"] > 2 * shares["worker-1"], shares
    by_forecast = [d for d in decisions if not d.fallback]
    assert len(by_forecast) > 20, "a loaded machine may miss a deadline"
    assert all(d.wall_us > 0 and d.prompt_tokens > 0 and d.max_tokens == 40 for d in by_forecast)
    joined = [o for o in outcomes if o.predicted_e2e_ns is not None]
    assert len(joined) >= len(by_forecast)
    assert all(o.placed_ns >= o.arrival_ns for o in joined)


async def test_the_explanation_says_what_was_predicted_and_what_happened(
    cluster: UnequalCluster, capsys: pytest.CaptureFixture[str]
):
    request = await predicting(cluster)
    folder = str(cluster.folder / "traces")
    until_s = time.monotonic() + PATIENCE_S
    text = ""
    while "what happened: completed" not in text:
        assert time.monotonic() < until_s, text
        await asyncio.sleep(0.1)  # spans are written by the half second
        await asyncio.to_thread(millrace, ["explain", request, "--dir", folder])
        text = capsys.readouterr().out
    assert "by forecast: lowest of 2" in text
    assert "→ worker-" in text
    assert "end to end" in text


async def test_a_predictor_that_is_killed_fails_no_request_and_is_asked_again_when_it_is_back(
    cluster: UnequalCluster,
):
    await predicting(cluster)
    cluster.processes["predictor-0"].kill()
    cluster.processes["predictor-0"].wait(10)
    async with told(cluster) as heard:
        await serve_many(cluster, 30, gap_s=0.02)
        decisions = await heard_all(heard, DecisionMade, 30)
    assert {d.fallback for d in decisions} == {"join_shortest_queue"}
    assert any("no answer in time" in d.reason for d in decisions)
    assert any("predictors were silent" in d.reason for d in decisions), "they are left alone for a while"
    cluster.start_predictor(0)
    await predicting(cluster)
    events = [line for line in cluster.log("ingress-0").splitlines() if "forecasts_" in line]
    assert [("missing" in line, "back" in line) for line in events[-2:]] == [(True, False), (False, True)], events


async def test_a_predictor_that_is_stopped_mid_stream_costs_deadlines_and_no_request(cluster: UnequalCluster):
    await predicting(cluster)
    process = cluster.processes["predictor-0"]
    async with told(cluster) as heard:
        serving = asyncio.ensure_future(serve_many(cluster, 40, gap_s=0.02))
        await asyncio.sleep(0.2)
        _signal(process, "STOP")
        await asyncio.sleep(0.5)
        _signal(process, "CONT")
        await serving
        decisions = await heard_all(heard, DecisionMade, 40)
    assert any(d.fallback for d in decisions)
    assert any(not d.fallback for d in decisions)


def _signal(process: subprocess.Popen[bytes], name: str) -> None:
    subprocess.run(["kill", f"-{name}", str(process.pid)], check=True)


def test_the_metrics_have_errors(cluster: UnequalCluster):
    text = httpx.get(f"{cluster.url}/metrics").text
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    assert float(samples['millrace_ingress_forecast_error_ratio_count{of="e2e"}']) > 0
    assert float(samples['millrace_ingress_fallbacks_total{reason="paused"}']) > 0
