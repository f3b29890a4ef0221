"""Requests and relayed tokens per second of ingress at saturation, and what each costs in CPU, with everything on.

Ingresses are pinned to the first core (with several ingresses: one core each, where there are enough), everything else
(nats-server, coordinator, tagger, modelled engines, load generator) to the last. The figure that other load on the
machine disturbs least is CPU time per request and per token; `per core` is what one core would do of that, were it
ingress's alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from bench.loadgen import Load
from tests.testbed.local_cluster import MODEL, ClusterOptions, LocalCluster

PROMPT = "List five animals and say which of them is the largest."


def main() -> int:
    """Runs both loads and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m bench ingress_throughput", description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--ingresses", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--profile", default="", help="folder for py-spy's raw stacks of ingress-0, one file per load")
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        options = ClusterOptions(
            folder=Path(folder),
            workers=arguments.workers,
            ingresses=arguments.ingresses,
            speed=0.0,
            ingress_cores=tuple(cores[: max(1, min(arguments.ingresses, len(cores) - 1))]),
            other_cores=(cores[-1],),
        )
        with LocalCluster(options) as cluster:
            for name, load in loads(cluster.port, arguments.seconds).items():
                print(row(name, measure(cluster, name, load, cores[-1], arguments.profile)), flush=True)
            for name in cluster.processes:
                if name.startswith("ingress"):
                    print(f"{name}: {cluster.resident_bytes(name) / 2**20:.0f} MiB resident at the end")
    return 0


def loads(port: int, seconds: float) -> dict[str, Load]:
    """The loads by name."""
    chat = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "ignore_eos": True}
    path = "/v1/chat/completions"
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    return {
        "short, 4 tokens, whole": Load(
            port=port, path=path, seconds=seconds, connections=64, body=chat | {"max_tokens": 4}
        ),
        "64 streams of 512 tokens": Load(
            port=port, path=path, seconds=seconds, connections=64, body=chat | usage | {"max_tokens": 512}
        ),
        "256 streams of 512 tokens": Load(
            port=port, path=path, seconds=seconds, connections=256, body=chat | usage | {"max_tokens": 512}
        ),
    }


def measure(cluster: LocalCluster, name: str, load: Load, core: int, profile: str) -> dict[str, Any]:
    """One load from a generator of its own process; with what each process of the cluster used meanwhile."""
    before = {process: cluster.cpu_s(process) for process in cluster.processes}
    profiler = start_profiler(cluster, name, load, profile) if profile else None
    command = ["taskset", "-c", str(core), sys.executable, "-m", "bench.loadgen", msgspec.json.encode(load).decode()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=load.seconds + load.warm_s + 60)
    if profiler is not None:
        profiler.wait(30)
    result: dict[str, Any] = json.loads(done.stdout)
    result["cpu_s"] = {process: cluster.cpu_s(process) - cpu for process, cpu in before.items()}
    result["ingress_cpu_s"] = sum(cpu for process, cpu in result["cpu_s"].items() if process.startswith("ingress"))
    # The generator counts in its measured time; the processes' clocks ran through its warm-up too.
    result["share_measured"] = load.seconds / (load.seconds + load.warm_s)
    return result


def start_profiler(cluster: LocalCluster, name: str, load: Load, folder: str) -> subprocess.Popen[bytes]:
    """py-spy on the first ingress, writing collapsed stacks."""
    file = Path(folder) / (name.replace(",", "").replace(" ", "-") + ".stacks")
    spy = Path(sys.executable).parent / "py-spy"
    return subprocess.Popen(
        [str(spy), "record", "--pid", str(cluster.processes["ingress-0"].pid), "--duration", str(int(load.seconds)),
         "--rate", "200", "--format", "raw", "--output", str(file)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def row(name: str, result: dict[str, Any]) -> str:
    """One line of the table."""
    cpu = result["ingress_cpu_s"] * result["share_measured"]
    others = {p: c for p, c in result["cpu_s"].items() if not p.startswith("ingress")}
    busiest = max(others, key=others.__getitem__)
    line = f"{name}: {result['requests_per_s']:.0f} req/s"
    if result["events_per_s"]:
        tokens = result["tokens_per_s"]
        # Tokens of streams that had not ended are in the events only.
        per_token = cpu / max(1, result["events_per_s"] * result["seconds"]) * 1e6
        line += f", {tokens} tok/s in ended streams, {result['events_per_s']} events/s"
        line += f"; {per_token:.2f} µs of ingress CPU per event ({1e6 / per_token:,.0f} per core and s)"
    else:
        per_request = cpu / max(1, result["requests"]) * 1e6
        whole = sum(result["cpu_s"].values()) * result["share_measured"] / max(1, result["requests"]) * 1e6
        line += f"; {per_request:.0f} µs of ingress CPU per request ({1e6 / per_request:,.0f} per core and s)"
        line += f", {whole:.0f} µs in all processes, nats-server and modelled engines included"
    line += f"; p50 {result['latency_ms_p50']} ms, p99 {result['latency_ms_p99']} ms; {result['errors']} errors"
    line += f"; busiest other process: {busiest} {others[busiest]:.1f} s, generator {result['generator_cpu_share']:.0%}"
    return line


if __name__ == "__main__":
    sys.exit(main())
