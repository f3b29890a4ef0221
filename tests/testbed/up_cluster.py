"""A whole cluster as a person starts it, `millrace up` in a folder of its own, for figures and for tests of faults."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import nats
import psutil
from millrace.cli.cluster import ConnectionSettings
from millrace.cli.cluster_rows import Totals
from millrace.cli.cluster_view import ClusterView
from millrace.cli.errors import CliError
from millrace.cli.listening import LISTEN_S, listen
from millrace.contracts.permissions import store_user
from nats.aio.client import Client

from tests.testbed.programs import Program, output_of, start_program
from tests.testbed.timed_streams import TimedStream, client, play
from tests.testbed.waiting import until

#: How long a start may take here: vLLM's import alone takes half a minute on a loaded machine.
START_LIMIT_S = 240.0

#: Ports that systems leave to servers.
PORTS = (20_000, 32_000)

#: Pause between two looks at what a listener has heard, seconds.
LOOK_S = 0.02


def free_port() -> int:
    """A TCP port that nobody listens on, outside the range that the system gives to connections by itself: nobody
    takes it before it is used.
    """
    while True:
        port = random.SystemRandom().randrange(*PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class UpRig:
    """One cluster: its ``--dir``, the base of its API, and the name of its model."""

    def __init__(
        self, folder: Path, *, model_path: Path, engine: str, instances: int, extra: Iterable[str] = ()
    ) -> None:
        model = ("--model", str(model_path), "--served-name", "m")
        self._prepare(folder, "m", ("--engine", engine, "--instances", str(instances), *model, *extra))

    @classmethod
    def of_words(cls, folder: Path, words: Iterable[str], model: str) -> UpRig:
        """A cluster by any words of `millrace up`, such as ``--cluster FILE``; streams ask for ``model``."""
        rig = cls.__new__(cls)
        rig._prepare(folder, model, words)
        return rig

    def _prepare(self, folder: Path, model: str, words: Iterable[str]) -> None:
        self.folder = folder
        self.model = model
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        ports = ("--port", str(self.port), "--nats-port", str(free_port()))
        no_page = ("--set", "page.port=0")  # unless one is asked
        self._words = ["up", "--dir", str(folder), *ports, *no_page, *words]
        self.process: Program | None = None

    def __enter__(self) -> UpRig:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, *words: str, python: Path | None = None) -> None:
        """Starts it, with further words, and waits for the banner. ``python``: another environment's."""
        self.folder.mkdir(parents=True, exist_ok=True)
        told = [*self._words, *words]
        with (self.folder / "up.out").open("wb") as out:
            if python is None:
                self.process = start_program("millrace.cli", told, output=out, own_session=True)
            else:
                command = [str(python), "-m", "millrace.cli", *told]
                self.process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
        deadline = time.monotonic() + START_LIMIT_S
        while "Millrace is up" not in self.output():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output() + self.logs()
            time.sleep(0.05)

    def again(self) -> subprocess.CompletedProcess[str]:
        """The same command once more, in the same folder."""
        command = [sys.executable, "-m", "millrace.cli", *self._words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

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

    def cli(self, *words: str, limit_s: float = 60.0) -> str:
        """A verb of the command line against this cluster."""
        environment = os.environ | {"MILLRACE_DIR": str(self.folder), "COLUMNS": "160"}
        return output_of("millrace.cli", words, environment=environment, limit_s=limit_s)[1]

    async def well(self, instances: int, limit_s: float = 120.0) -> None:
        """Waits until every instance is ready again: what follows must not meet an earlier fault's wounds."""
        await self.until(lambda totals: totals.instances_ready == instances, limit_s)

    async def until(self, holds: Callable[[Totals], bool], limit_s: float = 120.0) -> None:
        """Waits until the totals are such, as `status` shows them: one listener, no process per look."""
        await self.until_seen(lambda view: holds(view.totals(view.instances(time.time_ns()))), limit_s)

    async def until_said(self, holds: Callable[[str], bool], limit_s: float = 60.0) -> None:
        """Waits until `millrace status` prints such a text."""
        await until(lambda: asyncio.to_thread(lambda: holds(self.cli("status"))), limit_s, 0.1)

    async def totals(self) -> Totals:
        """The totals now."""
        seen: list[Totals] = []

        def any_totals(totals: Totals) -> bool:
            seen.append(totals)
            return True

        await self.until(any_totals)
        return seen[0]

    async def until_seen(self, holds: Callable[[ClusterView], bool], limit_s: float = 120.0) -> None:
        """Waits until an observer sees the cluster so, every registered instance heard."""
        deadline = time.monotonic() + limit_s
        while not await self._comes_true(holds, deadline):  # noqa: ASYNC110 - the bus is away
            await asyncio.sleep(LOOK_S)

    async def _comes_true(self, holds: Callable[[ClusterView], bool], deadline: float) -> bool:
        """False where no bus answers."""
        try:
            async with listen(self.connection()) as view:
                began = time.monotonic()
                while not (_all_heard(view, began) and holds(view)):
                    assert time.monotonic() < deadline, self.cli("status") + self.logs()
                    await asyncio.sleep(LOOK_S)
        except CliError:
            assert time.monotonic() < deadline, self.logs()
            return False
        return True

    async def operator_bus(self, *, store: bool = False) -> Client:
        """A connection with an operator's rights, to the bus or the store, which outlives a server that goes away."""
        known = self.cluster_file()
        user = store_user(known["operator_user"]) if store else known["operator_user"]
        return await nats.connect(
            known["nats_url"],
            user=user,
            password=known["operator_password"],
            inbox_prefix=f"_INBOX.{user}".encode(),
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.1,
        )

    def connection(self) -> ConnectionSettings:
        """The bus with an observer's rights."""
        known = self.cluster_file()
        return ConnectionSettings(
            cluster=known["cluster"],
            url=known["nats_url"],
            user=known["observer_user"],
            password=known["observer_password"],
            tls=known["nats_tls"],
            origin=str(self.folder),
        )

    async def metric(self, name: str, label: str = "") -> float:
        """Sum over the samples of a metric that ingress shows; of those alone that have ``label``, such as
        ``instance="worker-0"``.
        """
        async with client() as http:
            text = (await http.get(f"{self.url}/metrics")).text
        lines = [line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
        return sum(float(line.rpartition(" ")[2]) for line in lines if label in line)


def _all_heard(view: ClusterView, began: float) -> bool:
    """Whether every registered instance has been heard, or has had the time for it."""
    rows = view.instances(time.time_ns()) if view.connected else []
    return bool(rows) and (time.monotonic() - began > LISTEN_S or all(row.state != "starting" for row in rows))


async def stream(client: httpx.AsyncClient, rig: UpRig, prompt: str, **fields: Any) -> TimedStream:
    """One streamed completion, with usage."""
    return await play(client, rig, TimedStream(), prompt=prompt, **fields)


async def offer(rig: UpRig, *, rate: float, count: int, prompts: int, **fields: Any) -> list[tuple[int, TimedStream]]:
    """Starts ``count`` streams at ``rate`` a second over ``prompts`` different prompts; waits for all."""
    async with client(120) as http:
        tasks = []
        for index in range(count):
            number = index % prompts
            tasks.append((number, asyncio.create_task(stream(http, rig, prompt_text(number), **fields))))
            await asyncio.sleep(1 / rate)
        return [(number, await task) for number, task in tasks]


async def offer_during(
    rig: UpRig, work: Coroutine[Any, Any, None], *, rate: float, prompts: int, **fields: Any
) -> list[tuple[int, TimedStream]]:
    """Starts streams at ``rate`` a second until the work is done; waits for all."""
    async with client(120) as http:
        doing = asyncio.create_task(work)
        tasks: list[tuple[int, asyncio.Task[TimedStream]]] = []
        while not doing.done():
            number = len(tasks) % prompts
            tasks.append((number, asyncio.create_task(stream(http, rig, prompt_text(number), **fields))))
            await asyncio.wait([doing], timeout=1 / rate)
        results = [(number, await task) for number, task in tasks]
        await doing
        return results


def prompt_text(number: int) -> str:
    """The prompt of this number."""
    return f"Tell story number {number}, and count from {number} to {number + 40}."
