"""Real vLLM behind Millrace against the same vLLM's own server, with vLLM's defaults: speed and latency.

One engine on one core; all of Millrace (ingress, NATS, coordinator, tagger, the worker's front) and the load
generator on the other, as vLLM's own API server and the load generator are in turn. With `--rate` requests come at
random at so many a second instead of `--concurrency` at once. `--router` compares two engines on two cores: Millrace's,
as `./task up` starts them, against two of vLLM's servers behind its router (`vllm-router` on the path, its defaults).

vLLM's servers have `vllm serve`'s defaults but for the length of contexts and the size of the KV cache, of which vLLM
would take nearly all memory, and one thread per engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import numpy as np
import psutil

from bench.migration.separate_cores import pin
from tests.testbed.up_cluster import UpRig, free_port

MODELS = Path(__file__).resolve().parent.parent / "models"


class Target:
    """Something that speaks the OpenAI API.

    Attributes:
        pids: Its processes without their children.
    """

    def __init__(self, name: str, model: str, url: str, *, pids: Iterable[int]) -> None:
        self.name, self.model, self.url = name, model, url
        self.pids = tuple(pids)

    def cpu_s(self) -> float:
        """Processor time of its processes and their children so far, seconds."""
        own = [psutil.Process(pid) for pid in self.pids]
        tree = [*own, *(child for process in own for child in process.children(recursive=True))]
        return sum(sum(process.cpu_times()[:2]) for process in tree)


class Figures:
    """Measurements of a load: output tokens a second, TTFT and ITL in seconds."""

    def __init__(self) -> None:
        self.tokens = 0
        self.seconds = self.cpu_s = 0.0
        self.ttft: list[float] = []
        self.itl: list[float] = []
        self.e2e: list[float] = []

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def row(self, name: str) -> str:
        """One line of the table."""
        p = [np.percentile(values, q) * 1000 for values in (self.ttft, self.itl) for q in (50, 99)]
        whole, first = np.mean(self.e2e), np.mean(self.ttft) * 1000
        return (
            f"{name:34} {self.rate:8.0f} {first:9.1f} {p[0]:9.1f} {p[1]:9.1f} {p[2]:9.2f} {p[3]:9.2f} {whole:9.3f} "
            f"{self.cpu_s:7.1f}"
        )


async def load(target: Target, options: argparse.Namespace, requests: int) -> Figures:
    """A load of streams; every prompt differs, so the prefix cache helps nobody."""
    figures = Figures()
    queue = list(range(requests))
    pauses = np.random.default_rng(0).exponential(1 / options.rate, requests) if options.rate else ()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=300, limits=limits) as client:
        began, used_s = time.monotonic(), target.cpu_s()
        async with asyncio.TaskGroup() as group:
            for pause in pauses:
                await asyncio.sleep(pause)
                group.create_task(_request(client, target, queue.pop(), figures, options))
            for _ in range(0 if options.rate else options.concurrency):
                group.create_task(_client(client, target, queue, figures, options))
        figures.seconds, figures.cpu_s = time.monotonic() - began, target.cpu_s() - used_s
    return figures


async def _client(
    client: httpx.AsyncClient, target: Target, queue: list[int], figures: Figures, options: argparse.Namespace
) -> None:
    while queue:
        await _request(client, target, queue.pop(), figures, options)


async def _request(
    client: httpx.AsyncClient, target: Target, number: int, figures: Figures, options: argparse.Namespace
) -> None:
    prompt = [6 + (number * 31 + position * 7) % 200 for position in range(options.prompt_tokens)]
    body = {
        "model": target.model,
        "prompt": prompt,
        "max_tokens": options.tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = last = time.monotonic()
    first = 0.0
    async with client.stream("POST", f"{target.url}/v1/completions", json=body) as answer:
        assert answer.status_code == 200, (await answer.aread()).decode()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now = time.monotonic()
            event = json.loads(line[6:])
            if event["choices"]:
                if not first:
                    first = now
                    figures.ttft.append(now - began)
                else:
                    figures.itl.append(now - last)
                last = now
            if event.get("usage"):
                figures.tokens += event["usage"]["completion_tokens"]
    figures.e2e.append(time.monotonic() - began)


@contextmanager
def vllm_direct(folder: Path, model: Path, cores: list[int]) -> Iterator[Target]:
    """VLLM's own API server with one engine; front and engine on these cores."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", "m"),
        *("--port", str(port), "--host", "127.0.0.1", "--disable-uvicorn-access-log", "--max-model-len", "2048"),
        *("--kv-cache-memory-bytes", str(256 * 1024 * 1024)),
    ]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
    }
    told = folder / f"direct-{port}.log"
    with told.open("wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    target = Target("vLLM's own server", "m", f"http://127.0.0.1:{port}", pids=[server.pid])
    try:
        _wait(f"{target.url}/health", server, told)
        _pin(server.pid, cores)
        yield target
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=60)


@contextmanager
def routed(folder: Path, servers: list[Target]) -> Iterator[Target]:
    """Several servers behind vLLM's router."""
    port, urls, pids = free_port(), [each.url for each in servers], [pid for each in servers for pid in each.pids]
    executable = shutil.which("vllm-router")
    assert executable, "vllm-router is not on the path"
    told = folder / f"router-{port}.log"
    with told.open("wb") as log:
        command = [executable, "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls]
        started = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _wait(f"http://127.0.0.1:{port}/v1/models", started, told)
        yield Target("vLLM's own server, two and router", "m", f"http://127.0.0.1:{port}", pids=[*pids, started.pid])
    finally:
        started.terminate()
        started.wait(timeout=60)


def _wait(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 240
    while True:
        try:
            if httpx.get(url, timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        assert server.poll() is None, log.read_text(errors="replace")[-3000:]
        assert time.monotonic() < deadline, log.read_text(errors="replace")[-3000:]
        time.sleep(0.3)


def _pin(pid: int, cores: list[int]) -> None:
    """The server's front on the first core, its engine process and what that started on the second."""
    front = psutil.Process(pid)
    pin(front.pid, cores[:1])
    for child in front.children(recursive=True):
        pin(child.pid, cores[1:])


@contextmanager
def millrace(folder: Path, model: Path, *, instances: int, cores: list[int]) -> Iterator[Target]:
    """Millrace with real engines; with one engine everything but it is kept on the first core."""
    worker = {"max_model_len": 2048, "engine_cores": [cores[1]], "worker_cores": [cores[0]]}
    extra = ["--set", "worker=" + json.dumps(worker)] if instances == 1 else []
    folder /= f"millrace-{instances}"
    rig = UpRig(folder, model_path=model, engine="vllm", instances=instances, extra=extra)
    rig.start()
    try:
        if instances == 1:
            engines = set(rig.log_pids("worker-0")[1:])
            for process in rig.processes():
                pin(process.pid, cores[1:] if process.pid in engines else cores[:1])
        assert rig.process is not None
        name = f"Millrace, {instances} engine{'s' * (instances > 1)}"
        yield Target(name, rig.model, rig.url, pids=[rig.process.pid])
    finally:
        rig.stop()


def main() -> int:
    """Measures in turn, direct and through Millrace, and prints the ratio of each turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="millrace-mini")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second; 0 for a closed load")
    parser.add_argument("--router", action="store_true", help="two engines on two cores, vLLM's behind its router")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    model = MODELS / options.model if (MODELS / options.model).is_dir() else Path(options.model)
    print(f"{model.name}, {options.requests} requests, {options.concurrency} at once, "
          f"{options.prompt_tokens} tokens in, {options.tokens} out")  # fmt: skip
    print(
        f"{'':34} {'tok/s':>8} {'TTFT mean':>9} {'p50':>9} {'p99 ms':>9} {'ITL p50':>9} {'p99 ms':>9} {'mean s':>9} "
        f"{'CPU s':>7}"
    )
    ratios = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.sched_setaffinity(0, set(cores) if options.router else {cores[0]})  # what starts here until it pins itself
        for _ in range(options.turns):
            with ExitStack() as stack:
                pairs = [[core, core] for core in cores] if options.router else [cores]
                servers = [stack.enter_context(vllm_direct(folder, model, pair)) for pair in pairs]
                target = servers[0]
                if options.router:
                    target = stack.enter_context(routed(folder, servers))
                direct = _measure(target, options)
            with millrace(folder, model, instances=1 + options.router, cores=cores) as target:
                through = _measure(target, options)
            ratios.append([_figures(through)[what] / told for what, told in _figures(direct).items()])
    for what, column in zip(_figures(direct), zip(*ratios, strict=True), strict=True):
        print(
            f"{what}, Millrace / vLLM: {', '.join(f'{ratio:.3f}' for ratio in column)}; median {np.median(column):.3f}"
        )
    return 0


def _figures(figures: Figures) -> dict[str, float]:
    return {
        "tokens a second": figures.rate,
        "mean end-to-end time": float(np.mean(figures.e2e)),
        "mean TTFT": float(np.mean(figures.ttft)),
        "p99 of TTFT": float(np.percentile(figures.ttft, 99)),
        "processor time": figures.cpu_s,
    }


def _measure(target: Target, options: argparse.Namespace) -> Figures:
    asyncio.run(load(target, options, options.concurrency * 2))
    figures = asyncio.run(load(target, options, options.requests))
    print(figures.row(target.name), flush=True)
    return figures
