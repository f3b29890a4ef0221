"""The steps of `millrace selftest`, against a cluster that it starts itself."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import psutil
from nats.aio.client import Client

from millrace.cli.bus import open_bus
from millrace.cli.cluster import add_connection_options, resolve_connection
from millrace.cli.errors import CliError
from millrace.cli.machine_probes import MachineFacts
from millrace.cli.machine_report import MachineDefaults
from millrace.cli.migrate import find, line
from millrace.cli.operating import asked
from millrace.contracts.migration import MigrateSequence, MigrationFinished, MigrationOutcome
from millrace.contracts.sequences import request_id_of
from millrace.contracts.subjects import Subjects

#: Longest start: a first one compiles the model.
START_S = 620.0
#: Longest stream, and longest restart of an engine.
STREAM_S = 300.0
#: How long a move waits for a place at its target.
WITHIN_MS = 5_000
#: Share of a stream after which it is disturbed.
DISTURBED_AT = 0.1
#: Two engines share a GPU, each with room beside the other.
SHARED_GPU = {"kv_bytes": 2 << 30, "engine_args": {"gpu_memory_utilization": 0.35}}
PROMPT = "The ship leaves the harbour at noon and"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One step: ``passed``, ``differs`` (text that may differ, see docs/MIGRATION.md), ``failed`` or ``skipped``."""

    step: str
    result: str
    seconds: float
    detail: str


class Failure(Exception):
    """A step cannot go on; the message says why."""


async def _found(bus: Client, subjects: Subjects, request: str) -> dict[str, str]:
    """The stream's sequence and where it runs."""
    places = await find(bus, subjects, request)
    if not places:
        raise Failure("the stream ended before it could be found; try more --tokens")
    return places


#: A stream whose text is not that of the undisturbed one.
DIFFERS = "text differs"


class GreedyStream:
    """One greedy stream, read by a thread.

    Attributes:
        request: Its id; empty before its first event.
    """

    def __init__(self, url: str, tokens: int) -> None:
        self.request, self.text, self.error, self.events = "", "", "", 0
        self.gap_s = self.first_s = 0.0
        self._body = {"model": "selftest", "prompt": PROMPT, "max_tokens": tokens, "temperature": 0}
        self._url = url

    def run(self) -> GreedyStream:
        began = last = time.monotonic()
        # Special tokens are shown: past its end of sequence a model may write nothing else, and no text cannot differ.
        body = self._body | {"stream": True, "ignore_eos": True, "skip_special_tokens": False}
        with httpx2.stream("POST", f"{self._url}/v1/completions", json=body, timeout=STREAM_S) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event, now = json.loads(line[6:]), time.monotonic()
                self.error = self.error or str(event.get("error", ""))
                self.request = self.request or event.get("id", "").partition("-")[2]
                self.text += "".join(choice["text"] for choice in event.get("choices", ()))
                self.first_s = self.first_s or now - began
                self.gap_s = max(self.gap_s, now - last) if self.events else 0.0
                self.events, last = self.events + 1, now
        if self.error:
            raise Failure(self.error)
        return self


class SelfTest:
    """One run of the steps."""

    def __init__(
        self, folder: Path, facts: MachineFacts, ahead: MachineDefaults, arguments: argparse.Namespace
    ) -> None:
        self._folder, self._facts, self._arguments = folder, facts, arguments
        best = ahead.copiers[:1] or ["shared_memory"]
        #: By the engine that receives.
        self._copiers = {"worker-1": best[0], "worker-0": "nixl" if facts.nixl else best[0]}
        self._url = ""
        self._expected = GreedyStream("", 0)

    def outcomes(self) -> Iterator[Outcome]:
        """Runs each step; what follows a failed start is skipped."""
        try:
            start = self._step("start", self._start)
            yield start
            for name, step in (
                ("self-tests", self._self_tests),
                ("serve", self._serve),
                (f"move, {self._copiers['worker-1']}", lambda: self._move("worker-1")),
                (f"back, {self._copiers['worker-0']}", lambda: self._move("worker-0")),
                ("kill", self._kill),
            ):
                if start.result == "failed":
                    yield Outcome(step=name, result="skipped", seconds=0.0, detail="there is no cluster")
                else:
                    yield self._step(name, step)
        finally:
            self._verb("down")

    def _step(self, name: str, step: Callable[[], str]) -> Outcome:
        began = time.monotonic()
        try:
            detail = step()
            result = "differs" if detail.startswith("text differs") else "passed"
        except (Failure, CliError, httpx2.HTTPError, OSError, subprocess.SubprocessError, ValueError) as failure:
            detail, result = f"{type(failure).__name__}: {failure}", "failed"
        return Outcome(step=name, result=result, seconds=round(time.monotonic() - began, 1), detail=detail)

    def _start(self) -> str:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        words = ["--model", self._arguments.model, "--served-name", "selftest", "--instances", "2"]
        words += ["--engine", self._arguments.engine, "--port", str(port), "--detach"]
        if self._arguments.engine == "modelled":
            words += ["--processes", "2"]
        settings: dict[str, Any] = SHARED_GPU if self._facts.gpus else {}
        # Without a prefix cache, or a target would have most blocks already: all streams are equal.
        settings = settings | {"enable_prefix_caching": False, "migration": {"self_test": True}}
        words += ["--set", f"worker={json.dumps(settings)}"]
        if self._arguments.engine == "vllm":
            for name, copier in self._copiers.items():
                # Both ends offer every way; whoever reads takes its own first.
                others = sorted({*self._copiers.values()} - {copier})
                words += ["--set", f"{name}.migration.copiers={json.dumps([copier, *others])}"]
        said = self._verb("up", *words, limit_s=START_S)
        if said.returncode:
            raise Failure(f"{said.stdout}{said.stderr}".strip()[-2000:])
        return "two engines are ready"

    def _self_tests(self) -> str:
        """Results of the engines' own tests at their start: KV moved to the same engine, hidden states."""
        rows = self._instances()
        if refused := [f"{name}: {row['kv_refusal']}" for name, row in rows.items() if row["kv_refusal"]]:
            raise Failure("; ".join(refused))
        return "; ".join(f"{name} offers {', '.join(row['kv'])}" for name, row in rows.items())

    def _serve(self) -> str:
        self._expected = GreedyStream(self._url, self._arguments.tokens).run()
        again = GreedyStream(self._url, self._arguments.tokens)
        began = time.monotonic()
        again.run()
        if again.text != self._expected.text:
            raise Failure("the same greedy request gave two texts")
        rate = self._arguments.tokens / (time.monotonic() - began)
        return f"first token after {again.first_s * 1000:.0f} ms, {rate:.0f} tokens/s"

    def _move(self, target: str) -> str:
        said = self._disturbed(lambda stream: asyncio.run(self._moved(stream.request, target)))
        if said.startswith(DIFFERS):  # after a kill it may: what is recomputed may round differently
            raise Failure(said)
        return said

    async def _moved(self, request: str, target: str) -> str:
        """Moves it to the target, before that away from there; the last move in words."""
        async with self._operator() as (bus, subjects):
            ((sequence, place),) = (await _found(bus, subjects, request)).items()
            other = "worker-0" if target == "worker-1" else "worker-1"
            for step in [other, target] if place == target else [target]:
                order = MigrateSequence(sequence=sequence, target=step, within_ms=WITHIN_MS)
                answer = await asked(
                    bus, subjects.migrate(place, "start"), order, timeout_s=STREAM_S, request=request_id_of(sequence)
                )
                said, place = line(sequence, place, answer), step
                if not isinstance(answer, MigrationFinished) or answer.outcome is not MigrationOutcome.MOVED:
                    raise Failure(said)
        return said.partition("  ")[2]

    def _kill(self) -> str:
        def kill(stream: GreedyStream) -> str:
            os.kill(self._engine(asyncio.run(self._place(stream.request))), signal.SIGKILL)
            return ""

        told = self._disturbed(kill)
        began = time.monotonic()
        while sum(row["state"] == "ready" for row in self._instances().values()) < 2:
            if time.monotonic() > began + STREAM_S:
                raise Failure("the killed engine did not come back")
        return f"{told}; back {time.monotonic() - began:.1f} s after the stream's end"

    def _disturbed(self, disturb: Callable[[GreedyStream], str]) -> str:
        """A stream that is disturbed in its middle, and goes on."""
        stream = GreedyStream(self._url, self._arguments.tokens)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(stream.run)
            while stream.events < self._expected.events * DISTURBED_AT and not running.done():
                time.sleep(0.005)
            said = disturb(stream)
            running.result()
        equal = "text unchanged" if stream.text == self._expected.text else DIFFERS
        return ", ".join(filter(None, [equal, f"longest pause {stream.gap_s * 1000:.0f} ms", said]))

    @contextlib.asynccontextmanager
    async def _operator(self) -> AsyncIterator[tuple[Client, Subjects]]:
        parser = argparse.ArgumentParser()
        add_connection_options(parser)
        connection = resolve_connection(parser.parse_args(["--dir", str(self._folder)]), operator=True)
        async with open_bus(connection) as bus:
            yield bus, Subjects(connection.cluster)

    async def _place(self, request: str) -> str:
        async with self._operator() as (bus, subjects):
            return next(iter((await _found(bus, subjects, request)).values()))

    def _engine(self, instance: str) -> int:
        """The engine's process: the youngest one that writes to its worker's log."""
        log = str(self._folder / "logs" / f"{instance}.log")
        found = []
        for process in psutil.process_iter():
            try:
                if os.readlink(f"/proc/{process.pid}/fd/2") == log:
                    found.append((process.create_time(), process.pid))
            except (OSError, psutil.Error):
                continue
        if not found:
            raise Failure(f"no process writes to {log}")
        return max(found)[1]

    def _instances(self) -> dict[str, Any]:
        said = self._verb("status", "--json")
        return {row["instance"]: row for row in json.loads(said.stdout)["instances"]}

    def _verb(self, *words: str, limit_s: float = STREAM_S) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "millrace.cli", *words, "--dir", str(self._folder)]
        return subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
