"""Ways of serving that `bench as_shipped` compares: clusters of `millrace up`. Others are in as_shipped_peers.py."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx

from bench.migration.separate_cores import pin
from tests.testbed.up_cluster import UpRig

#: Lines of the cluster's file for a policy that needs no predictor.
POLICY = '[services]\npredictors = 0\n[policies]\ndispatch = {{ name = "{}" }}\n'


class Served:
    """Running server and its processes.

    Attributes:
        port: Of the API.
    """

    def __init__(
        self, port: int, processes: dict[str, int], rig: UpRig | None = None, worker_pages: Iterable[str] = ()
    ) -> None:
        """``processes``: Pids by name. ``rig``: Of ours. ``worker_pages``: URLs of the workers' metrics."""
        self.port = port
        self._processes = processes
        self._rig = rig
        self._worker_pages = tuple(worker_pages)

    def keep_apart(self) -> None:
        """Ingress, or what stands in its place, on the first core of the machine; all else on the others."""
        for name, pid in self._processes.items():
            pin(pid, [0] if name.startswith("ingress") else list(range(1, os.cpu_count() or 1)))

    def cpu_s(self) -> dict[str, float]:
        """CPU time of every process so far, seconds."""
        return {name: cpu_s(pid) for name, pid in self._processes.items()}

    async def decisions(self) -> tuple[float, float]:
        """Placements so far, and those of them that a fallback policy decided."""
        if self._rig is None:
            return 0.0, 0.0
        placed = await self._rig.metric("millrace_ingress_dispatches_total")
        return placed, await self._rig.metric("millrace_ingress_fallbacks_total")

    def token_messages(self) -> float:
        """Token messages that the workers have sent so far."""
        pages = (httpx.get(url).text for url in self._worker_pages)
        lines = (line for page in pages for line in page.splitlines())
        name = "millrace_worker_token_messages_total{"
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def cpu_s(pid: int) -> float:
    """CPU time that a process has used so far, seconds: by its clock, as /proc counts in hundredths of a second."""
    return time.clock_gettime(~pid << 3 | 2)  # as clock_getcpuclockid makes it


def ask(port: int) -> bool:
    """Whether a request of one token is answered."""
    chat = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    try:
        return httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=chat, timeout=120).is_success
    except httpx.ConnectError:
        return False


@contextmanager
def open_way(lines: str, folder: Path, instances: int) -> Iterator[Served]:
    """Starts a cluster with these lines in its file, and ends it."""
    rig = UpRig.of_words(folder / "up", ("--cluster", str(_cluster_file(lines, folder, instances))), "m")
    try:
        rig.start()
        assert ask(rig.port), rig.logs()
        yield Served(rig.port, _named(rig), rig, _worker_pages(rig))
    finally:
        rig.stop()


def _cluster_file(lines: str, folder: Path, instances: int) -> Path:
    path = folder / "cluster.toml"
    path.write_text(
        '[[models]]\nname = "m"\npath = "millrace-nano"\n'
        '[[models.groups]]\nengine = "modelled"\n'
        f"count = {instances}\nprocesses = {min(instances, 2)}\nsettings = {{ modelled = {{ speed = 0.0 }} }}\n{lines}"
    )
    return path


def _named(rig: UpRig) -> dict[str, int]:
    """Pids of the services by the name of their configuration."""
    found = {file.stem: pid for pid, file in _configurations(rig).items()}
    server = next(each for each in rig.processes() if "".join(each.cmdline()[:1]).endswith("nats-server"))
    return found | {"nats": server.pid}


def _configurations(rig: UpRig) -> dict[int, Path]:
    """Each service's configuration by its pid."""
    # A service that was forked shows its command line as one word.
    commands = {process.pid: " ".join(process.cmdline()).split() for process in rig.processes()}
    return {pid: Path(words[words.index("--config") + 1]) for pid, words in commands.items() if "--config" in words}


def _worker_pages(rig: UpRig) -> list[str]:
    files = [file for file in _configurations(rig).values() if file.stem.startswith("worker")]
    ports = [json.loads(file.read_text())["telemetry"]["metrics_port"] for file in files]
    return [f"http://127.0.0.1:{port}/metrics" for port in ports]


#: Ways by name; each takes a folder and a number of instances.
WAYS = {
    "shipped": partial(open_way, ""),
    "jsq": partial(open_way, POLICY.format("join_shortest_queue")),
    "round_robin": partial(open_way, POLICY.format("round_robin")),
}
