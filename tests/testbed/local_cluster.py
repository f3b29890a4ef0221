"""A cluster of real processes on free ports, for figures and live tests: nats-server, coordinator, tagger, workers with
modelled engines, ingresses. What each process costs is read from /proc.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
from millrace.actor.config import BusConfig

from models.training.tokenizer import write_tokenizer
from services.supervisor.buckets import create_buckets
from tests.testbed.programs import Program, start_program

MODEL = "bench"
#: Connections in a row that find several ingresses ready: with two, one that is not is missed once in 2^40.
READY_IN_A_ROW = 40
#: How long the cluster has to become ready, seconds.
READY_S = 30.0


class ClusterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the cluster to start.

    Attributes:
        workers: Worker processes, each with ``instances`` modelled engines.
        speed: How much faster than modelled time the engines run; 0 for steps that take no time.
        ingress_cores: Cores of the ingresses, of everything else in ``other_cores``; empty for no pinning.
        ingress: Further fields of IngressConfig.
        worker: Further fields of WorkerConfig.
        predictors: Predictor processes, replicas of each other.
        hosting: Whether each ingress hosts a predictor and a tagger in its own process, as `millrace up` does.
        trace_sample: Share of traced requests.
    """

    folder: Path
    workers: int = 1
    instances: int = 1
    ingresses: int = 1
    speed: float = 1.0
    max_model_len: int = 4096
    ingress_cores: tuple[int, ...] = ()
    other_cores: tuple[int, ...] = ()
    ingress: dict[str, Any] = {}
    worker: dict[str, Any] = {}
    modelled: dict[str, Any] = {}
    predictors: int = 0
    hosting: bool = False
    trace_sample: float = 0.01


class LocalCluster:
    """Started on entry, ended on exit.

    Attributes:
        port: Of the API.
        model_folder: Tokenizer and configuration of the served model, named MODEL.
        processes: By name: ``nats``, ``coordinator``, ``tagger``, ``worker-0``, ``ingress-0``, ...
    """

    def __init__(self, options: ClusterOptions) -> None:
        self.options = options
        self.folder = options.folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.model_folder = self.folder / "model"
        self.processes: dict[str, Program | subprocess.Popen[bytes]] = {}
        self.port = free_port()
        self.nats_port = free_port()

    @property
    def url(self) -> str:
        """Base URL of the API."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def bus(self) -> dict[str, Any]:
        """Configuration of the bus."""
        return {"cluster": "bench", "servers": [f"nats://127.0.0.1:{self.nats_port}"]}

    def __enter__(self) -> LocalCluster:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        options = self.options
        write_tokenizer(self.model_folder)
        (self.model_folder / "config.json").write_bytes(
            msgspec.json.encode({"max_position_embeddings": options.max_model_len})
        )
        self.start_nats()
        asyncio.run(create_buckets(msgspec.convert(self.bus, BusConfig)))
        for name in ("coordinator",) if options.hosting else ("coordinator", "tagger"):
            self._service(name, f"{name}-0", {}, options.other_cores)
        for index in range(options.predictors):
            self.start_predictor(index)
        for index in range(options.workers):
            self.start_worker(index)
        for index in range(options.ingresses):
            self.start_ingress(index)
        self.wait_ready()

    def _all_listen(self) -> bool:
        logs = [self.folder / f"ingress-{index}.log" for index in range(self.options.ingresses)]
        return all(log.exists() and "listening" in log.read_text() for log in logs)

    def start_nats(self) -> None:
        """Starts (again) the server, with the store it had."""
        binary = Path(sys.executable).parent / "nats-server"
        command = [str(binary), "-a", "127.0.0.1", "-p", str(self.nats_port), "-js", "-sd", str(self.folder / "nats")]
        self._spawn("nats", command, self.options.other_cores)
        until_s = time.monotonic() + 10
        while time.monotonic() < until_s:
            try:
                socket.create_connection(("127.0.0.1", self.nats_port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.02)
        raise RuntimeError(f"nats-server does not listen: {self.log('nats')}")

    def start_predictor(self, index: int) -> None:
        """Starts (again) one predictor."""
        self._service("predictor", f"predictor-{index}", {}, self.options.other_cores)

    def start_worker(self, index: int) -> None:
        """Starts (again) one worker process."""
        options = self.options
        limits = {"max_model_len": options.max_model_len, "max_num_batched_tokens": 8192, "kv_blocks": 20_000}
        modelled = {"speed": options.speed, "tokenizer": str(self.model_folder)} | options.modelled
        fields = {"model": MODEL, "engine": "modelled", "instances": options.instances, "modelled": modelled}
        fields |= {"block_size": 16, "max_num_seqs": 256} | limits
        self._service("worker", f"worker-{index}", fields | options.worker, options.other_cores)

    def start_ingress(self, index: int) -> None:
        """Starts (again) one ingress."""
        fields: dict[str, Any] = {
            "http": {"port": self.port, "reuse_port": True},
            "models": [{"name": MODEL, "path": str(self.model_folder)}],
        }
        for name, value in self.options.ingress.items():
            fields[name] = fields[name] | value if isinstance(fields.get(name), dict) else value
        hosted = []
        for role in ("predictor", "tagger") if self.options.hosting else ():
            hosted += [f"--{role}", str(self._config_file(f"{role}-{index}", {}))]
        package = "deployment" if hosted else "services"
        file = self._config_file(f"ingress-{index}", fields)
        command = [sys.executable, "-m", f"{package}.ingress", "--config", str(file), *hosted]
        self._spawn(f"ingress-{index}", command, self.options.ingress_cores)

    def wait_ready(self) -> None:
        """Waits until the API serves the model, at every ingress: they share a port, and each connection gets any.

        Raises:
            RuntimeError: not in time, or a process ended; with the end of its log.
        """
        until_s = time.monotonic() + READY_S
        answers = 0
        while time.monotonic() < until_s:
            for name, process in self.processes.items():
                if process.poll() is not None:
                    raise RuntimeError(f"{name} ended: {self.log(name)}")
            try:
                with urllib.request.urlopen(f"{self.url}/ready", timeout=1):
                    answers += self._all_listen()
            except (urllib.error.URLError, OSError):
                answers = 0
                time.sleep(0.05)
            if answers >= (1 if self.options.ingresses == 1 else READY_IN_A_ROW):
                return
        raise RuntimeError("not ready: " + " | ".join(f"{n}: {self.log(n)}" for n in self.processes))

    def cpu_s(self, name: str) -> float:
        """CPU time that a process has used so far, seconds."""
        fields = Path(f"/proc/{self.processes[name].pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_bytes(self, name: str) -> int:
        """Memory that a process holds."""
        pages = int(Path(f"/proc/{self.processes[name].pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def log(self, name: str) -> str:
        """End of a process's output."""
        file = self.folder / f"{name}.log"
        return file.read_text(errors="replace")[-3000:] if file.exists() else ""

    def close(self) -> None:
        """Ends every process, nats-server last."""
        for name in reversed(self.processes):
            self.stop(name)

    def stop(self, name: str) -> None:
        """Ends one process in order, after five seconds by force."""
        process = self.processes[name]
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)

    def _service(self, noun: str, name: str, fields: dict[str, Any], cores: tuple[int, ...]) -> None:
        file = self._config_file(name, fields)
        self._spawn(name, [sys.executable, "-m", f"services.{noun}", "--config", str(file)], cores)

    def _config_file(self, name: str, fields: dict[str, Any]) -> Path:
        traces = {"trace_dir": str(self.folder / "traces"), "trace_sample": self.options.trace_sample}
        file = self.folder / f"{name}.json"
        common = {"name": name, "bus": self.bus, "telemetry": {"log_format": "json"} | traces}
        file.write_bytes(msgspec.json.encode(common | fields))
        return file

    def _spawn(self, name: str, command: list[str], cores: tuple[int, ...]) -> None:
        if cores:
            command = ["taskset", "-c", ",".join(map(str, cores)), *command]
        with open(self.folder / f"{name}.log", "ab") as log:
            if command[:2] == [sys.executable, "-m"]:
                self.processes[name] = start_program(command[2], command[3:], output=log)
            else:
                self.processes[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
