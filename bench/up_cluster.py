"""A whole cluster as a person starts it, `millrace up` in a folder of its own, for figures and for tests of faults."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import psutil

#: How long a start may take here: vLLM's import alone takes half a minute on a loaded machine.
START_LIMIT_S = 240.0


def free_port() -> int:
    """A TCP port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class UpRig:
    """One cluster.

    Attributes:
        folder: Its ``--dir``.
        url: Base of its API.
        model: Served name.
    """

    def __init__(
        self, folder: Path, *, model_path: Path, engine: str, instances: int, extra: Iterable[str] = ()
    ) -> None:
        model = ("--model", str(model_path), "--served-name", "m")
        self._prepare(folder, "m", ("--engine", engine, "--instances", str(instances), *model, *extra))

    @classmethod
    def of_words(cls, folder: Path, words: Iterable[str], model: str) -> UpRig:
        """A cluster by any words of `millrace up`.

        Args:
            folder: Its ``--dir``.
            words: What describes the cluster, such as ``--cluster FILE``.
            model: Served name that ``stream`` asks for unless it is given another one.
        """
        rig = cls.__new__(cls)
        rig._prepare(folder, model, words)
        return rig

    def _prepare(self, folder: Path, model: str, words: Iterable[str]) -> None:
        self.folder = folder
        self.model = model
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [
            *(sys.executable, "-m", "millrace.cli", "up", "--dir", str(folder)),
            *("--port", str(self.port), "--nats-port", str(free_port()), *words),
        ]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it and waits for the banner."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "up.out").open("wb") as out:
            self.process = subprocess.Popen(self._command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        deadline = time.monotonic() + START_LIMIT_S
        while "Millrace is up" not in self.output():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output() + self.logs()
            time.sleep(0.05)

    def again(self) -> subprocess.CompletedProcess[str]:
        """The same command once more, in the same folder."""
        return subprocess.run(self._command, capture_output=True, text=True, timeout=60, check=False)

    def stop(self) -> None:
        """Ctrl-C, and a bounded wait; whatever is left then is killed by pid."""
        if self.process is None:
            return
        left = self.processes()
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(timeout=60)
        finally:
            for process in left:
                if process.is_running():
                    process.kill()

    def output(self) -> str:
        return (self.folder / "up.out").read_text(errors="replace")

    def logs(self) -> str:
        """The end of every log, for a failing test."""
        files = sorted((self.folder / "logs").glob("*.log"))
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-1500:]}" for file in files)

    def cluster_file(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / "run" / "cluster.json").read_text())
        return content

    def processes(self) -> list[psutil.Process]:
        """Every process below the supervisor."""
        assert self.process is not None
        return psutil.Process(self.process.pid).children(recursive=True)

    def pids(self, what: str) -> list[int]:
        """Processes whose command line names ``what``: ``nats-server``, ``services.ingress``, ``worker-0.json``, ..."""
        found = []
        for process in self.processes():
            try:
                if what in " ".join(process.cmdline()):
                    found.append(process.pid)
            except psutil.Error:
                continue
        return sorted(found)

    def log_pids(self, name: str) -> list[int]:
        """Processes whose standard error is the log of child ``name``: a worker and its engine, oldest first."""
        log = str(self.folder / "logs" / f"{name}.log")
        found = []
        for process in self.processes():
            try:
                if os.readlink(f"/proc/{process.pid}/fd/2") == log:
                    found.append((process.create_time(), process.pid))
            except (OSError, psutil.Error):
                continue
        return [pid for _, pid in sorted(found)]

    def cli(self, *words: str) -> str:
        """A verb of the command line against this cluster."""
        command = [sys.executable, "-m", "millrace.cli", *words]
        environment = os.environ | {"MILLRACE_DIR": str(self.folder), "COLUMNS": "160"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
        return done.stdout + done.stderr

    async def well(self, instances: int, limit_s: float = 120.0) -> None:
        """Waits until every instance is ready again: what follows must not meet an earlier fault's wounds."""
        deadline = time.monotonic() + limit_s
        while self.totals().get("instances_ready") != instances:
            assert time.monotonic() < deadline, self.cli("status") + self.logs()
            await asyncio.sleep(0.3)

    def totals(self) -> dict[str, Any]:
        """Return the totals of `status --json`; empty while the bus is away."""
        try:
            totals: dict[str, Any] = json.loads(self.cli("status", "--json"))["totals"]
        except json.JSONDecodeError:
            return {}
        return totals

    async def metric(self, name: str) -> float:
        """Sum over all samples of a metric that ingress shows."""
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"{self.url}/metrics")).text
        lines = [line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
        return sum(float(line.rpartition(" ")[2]) for line in lines)


class Streamed:
    """Result of a stream: its text, how it ended, its usage, its longest pause and whole time in seconds."""

    def __init__(self) -> None:
        self.text = ""
        self.finish = ""
        self.error = ""
        self.usage: dict[str, Any] = {}
        self.pause_s = 0.0
        self.took_s = 0.0

    @property
    def outcome(self) -> tuple[str, str, int]:
        """Part of the result that must not depend on faults."""
        return (self.text, self.finish, int(self.usage.get("completion_tokens", -1)))


async def stream(client: httpx.AsyncClient, rig: UpRig, prompt: str, **fields: Any) -> Streamed:
    """One streamed completion, with usage."""
    body = {
        "model": rig.model,
        "prompt": prompt,
        "stream": True,
        "temperature": 0,
        "stream_options": {"include_usage": True},
        **fields,
    }
    result = Streamed()
    began = last = time.monotonic()
    try:
        async with client.stream("POST", f"{rig.url}/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                result.error = f"{answer.status_code} {(await answer.aread()).decode()[:300]}"
                return result
            async for line in answer.aiter_lines():
                now = time.monotonic()
                result.pause_s, last = max(result.pause_s, now - last), now
                if line.startswith("data: ") and line != "data: [DONE]":
                    _take(result, json.loads(line[6:]))
    except httpx.HTTPError as error:
        result.error = f"{type(error).__name__}: {error}"
    result.took_s = time.monotonic() - began
    return result


def _take(result: Streamed, event: dict[str, Any]) -> None:
    if "error" in event:
        result.error = str(event["error"])
        return
    for choice in event["choices"]:
        result.text += choice["text"]
        result.finish = choice["finish_reason"] or result.finish
    result.usage = event.get("usage") or result.usage


async def offer(rig: UpRig, *, rate: float, count: int, prompts: int, **fields: Any) -> list[tuple[int, Streamed]]:
    """Starts ``count`` streams at ``rate`` a second over ``prompts`` different prompts; waits for all."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:
        tasks = []
        for index in range(count):
            number = index % prompts
            tasks.append((number, asyncio.create_task(stream(client, rig, prompt_text(number), **fields))))
            await asyncio.sleep(1 / rate)
        return [(number, await task) for number, task in tasks]


def prompt_text(number: int) -> str:
    """The prompt of this number."""
    return f"Tell story number {number}, and count from {number} to {number + 40}."
