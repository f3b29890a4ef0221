"""Serving figures of `millrace up` as it is: default configuration, modelled engines that take no time.

Several ways take the same loads in turn, round after round, so that other load on the machine disturbs all alike; the
median of the rounds is printed. What other load disturbs least is CPU time, read from /proc for every process of the
cluster but the generator.

| way | what runs |
|---|---|
| `shipped` | `millrace up`, defaults |
| `jsq` | the policy `join_shortest_queue`, no predictor |
| `dynamo` | NVIDIA Dynamo in place of Millrace ([how](as_shipped_dynamo.py)) |
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec

from bench.as_shipped_dynamo import open_dynamo
from bench.as_shipped_ways import WAYS, Served, open_way
from bench.loadgen import Load

PROMPT = "List five animals and say which of them is the largest."
MODEL = "m"


def main() -> int:
    """Runs all ways in alternating rounds and prints one table per load."""
    parser = argparse.ArgumentParser(prog="python -m bench as_shipped", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="measured time per load")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--ingresses", type=int, default=1)
    parser.add_argument("--ways", default="shipped,jsq", help=f"of {', '.join(WAYS)}, dynamo")
    parser.add_argument("--loads", default="", help="beginnings of loads' names, by comma (default: all)")
    arguments = parser.parse_args()
    ways = arguments.ways.split(",")
    print(f"instances: {arguments.instances}; ingresses: {arguments.ingresses}; ways: {', '.join(ways)}")
    measured: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for _ in range(arguments.rounds):
        for name in ways:
            for load, result in run_way(name, arguments).items():
                measured.setdefault((load, name), []).append(result)
                print(f"  {load}, {name}: {row(result)}", file=sys.stderr, flush=True)
    for load in dict.fromkeys(load for load, _ in measured):
        print(f"{load}:")
        for name in ways:
            if found := measured.get((load, name)):
                print(f"  {name:<8} {row(median_of(found))}")
    return 0


def loads(port: int, seconds: float) -> dict[str, Load]:
    """The loads by name."""
    chat = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "ignore_eos": True}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    closed = Load(
        port=port, path="/v1/chat/completions", seconds=seconds, connections=32, body=chat | {"max_tokens": 4}
    )
    streams = msgspec.structs.replace(closed, body=chat | usage | {"max_tokens": 512})
    calm = msgspec.structs.replace(closed, rate=50.0, connections=64)
    return {
        "short, 32 connections": closed,
        "64 streams": msgspec.structs.replace(streams, connections=64),
        "256 streams": msgspec.structs.replace(streams, connections=256),
        "whole, 50 a second": calm,
        "stream, 50 a second": msgspec.structs.replace(calm, body=chat | usage | {"max_tokens": 32}),
    }


def run_way(way: str, arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """One start of one way, with every load."""
    wanted = tuple(arguments.loads.split(","))
    results = {}
    with tempfile.TemporaryDirectory() as folder, _opened(way, Path(folder), arguments) as served:
        for name, load in loads(served.port, arguments.seconds).items():
            if name.startswith(wanted):
                results[name] = measure(served, load)
    return results


def _opened(way: str, folder: Path, arguments: argparse.Namespace) -> AbstractContextManager[Served]:
    if way == "dynamo":
        return open_dynamo(folder, arguments.instances)
    return open_way(WAYS[way], folder, arguments.instances, arguments.ingresses)


def measure(served: Served, load: Load) -> dict[str, Any]:
    """One load from a generator of its own process; with what each process used meanwhile."""
    before, decided, messages = served.cpu_s(), asyncio.run(served.decisions()), served.token_messages()
    command = [sys.executable, "-m", "bench.loadgen", msgspec.json.encode(load).decode()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=load.seconds + load.warm_s + 60)
    result: dict[str, Any] = json.loads(done.stdout)
    after, now_decided = served.cpu_s(), asyncio.run(served.decisions())
    # The processes' clocks ran through the warm-up too, in which the generator does not count.
    share = load.seconds / (load.seconds + load.warm_s)
    used = {name: (cpu - before.get(name, 0.0)) * share for name, cpu in after.items()}
    streamed = load.body.get("stream", False)
    count = max(1, result["events_per_s"] * result["seconds"] if streamed else result["requests"])
    per, messages = 1e6 / count, (served.token_messages() - messages) * share
    placed, fell_back = (now - then for now, then in zip(now_decided, decided, strict=True))
    return {
        "requests_per_s": result["requests_per_s"],
        "tokens_per_s": result["events_per_s"] if streamed else 0,
        "gateway_us": sum(cpu for name, cpu in used.items() if name.startswith("ingress")) * per,
        "all_us": sum(used.values()) * per,
        "by_policy": 1 - fell_back / placed if placed else 0.0,
        "p50_ms": result["ttft_ms_p50"] or result["latency_ms_p50"],
        "p99_ms": result["ttft_ms_p99"] or result["latency_ms_p99"],
        "errors": result["errors"],
        "per_message": count / messages if messages else 0.0,
        "by_process": {name: round(cpu * per, 1) for name, cpu in used.items() if cpu * per >= 1},
    }


def median_of(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Median of each figure, the processes' too."""
    kept = {key: [each[key] for each in found if each[key] is not None] for key in found[0] if key != "by_process"}
    figures = {key: statistics.median(values) if values else None for key, values in kept.items()}
    names = dict.fromkeys(name for each in found for name in each["by_process"])
    by_process = {n: statistics.median(each["by_process"].get(n, 0.0) for each in found) for n in names}
    return {**figures, "by_process": by_process}


def row(result: dict[str, Any]) -> str:
    """One line of the table."""
    streamed = result["tokens_per_s"] > 0
    rate = f"{result['tokens_per_s']:,.0f} tokens/s" if streamed else f"{result['requests_per_s']:,.0f} requests/s"
    unit = "token" if streamed else "request"
    processes = ", ".join(f"{name} {cpu:g}" for name, cpu in result["by_process"].items())
    return (
        f"{rate}; CPU per {unit}: gateway {result['gateway_us']:.1f} µs, all {result['all_us']:.1f} µs; "
        f"p50 {_ms(result['p50_ms'])}, p99 {_ms(result['p99_ms'])}; "
        f"{result['by_policy']:.1%} decided by the way's own policy; {result['errors']:.0f} errors; "
        f"{result['per_message']:.1f} {unit}s a message of a worker; [{processes}]"
    )


def _ms(value: float | None) -> str:
    """A time; a dash where no first token came while the load ran."""
    return "-" if value is None else f"{value:.2f} ms"


if __name__ == "__main__":
    sys.exit(main())
