"""Real engines with one ingress per policy, so that policies take turns on the same engines within seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.testbed.up_cluster import UpRig, free_port

ROOT = Path(__file__).resolve().parents[2]

#: How long a further ingress has to become ready.
READY_S = 60.0


class PolicyRig:
    """A cluster as `millrace up` starts it; its own ingress has the first policy, and each other policy gets one more.

    Attributes:
        ports: Of the APIs, by policy.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model_path: Path,
        engine: str,
        policies: Sequence[str],
        workers: Sequence[Mapping[str, Any]],
    ) -> None:
        """Args:
        workers: What each worker is told beside what `millrace up` tells it: fields of WorkerConfig.
        """
        extra = ["--policy", policies[0], "--set", "telemetry.trace_sample=0", *worker_words(workers)]
        if engine == "modelled":
            extra += ["--processes", str(len(workers))]  # so that each has settings of its own
        self.up = UpRig(folder, model_path=model_path, engine=engine, instances=len(workers), extra=extra)
        self.model = self.up.model
        self.ports = {policies[0]: self.up.port}
        self._further = list(policies[1:])
        self._ingresses: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> PolicyRig:
        self.up.start()
        try:
            for number, policy in enumerate(self._further, start=1):
                self._start_ingress(number, policy)
            for policy in self.ports:
                self._await_ready(policy)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _start_ingress(self, number: int, policy: str) -> None:
        run = self.up.folder / "run"
        config = json.loads((run / "ingress-0.json").read_text())
        port = free_port()
        config["name"] = f"ingress-{number}"
        config["http"]["port"] = port
        config["telemetry"]["metrics_port"] = free_port()
        config["dispatch"] = {"policy": policy}
        path = run / f"ingress-{number}.json"
        path.touch(mode=0o600)  # it holds the bus's password
        path.write_text(json.dumps(config))
        command = [sys.executable, "-m", "services.ingress", "--config", str(path)]
        with (self.up.folder / "logs" / f"ingress-{number}.log").open("wb") as log:
            self._ingresses.append(subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log))
        self.ports[policy] = port

    def _await_ready(self, policy: str) -> None:
        deadline = time.monotonic() + READY_S
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[policy]}/v1/models", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                assert time.monotonic() < deadline, f"the ingress of {policy} is not ready\n{self.up.logs()}"
                time.sleep(0.1)

    def _stop(self) -> None:
        for process in self._ingresses:
            process.terminate()
        for process in self._ingresses:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
        self.up.stop()


def worker_words(workers: Sequence[Mapping[str, Any]]) -> list[str]:
    """The options of `millrace up` that tell each worker its own."""
    told = [f"worker-{index}={json.dumps(fields)}" for index, fields in enumerate(workers) if fields]
    return [word for each in told for word in ("--set", each)]


class MachineWatch:
    """Says how much of the machine others took meanwhile: what no process of the rig or of this one has used."""

    def __init__(self, rig: PolicyRig) -> None:
        self._rig = rig
        self._own_s = self._own()
        self._busy_s = _busy_s()
        self._began_s = time.monotonic()

    def words(self) -> str:
        """Cores used by the rig and by everybody else since the beginning; load average."""
        passed_s = time.monotonic() - self._began_s
        own = (self._own() - self._own_s) / passed_s
        others = (_busy_s() - self._busy_s) / passed_s - own
        return f"{own:.2f} cores by the cluster, {others:.2f} by others, load average {os.getloadavg()[0]:.1f}"

    def _own(self) -> float:
        """Processor time of this process, the cluster and the further ingresses, s."""
        rig = self._rig
        pids = [os.getpid(), *(process.pid for process in rig._ingresses)]
        pids += [process.pid for process in rig.up.processes()]
        if rig.up.process is not None:
            pids.append(rig.up.process.pid)
        return sum(_cpu_s(pid) for pid in set(pids))


def _cpu_s(pid: int) -> float:
    """User and system time of a process and of its children that ended, s; 0 where it has ended itself."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _busy_s() -> float:
    """Time that all cores together were not idle, s."""
    fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")
