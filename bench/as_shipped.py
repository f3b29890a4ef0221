"""Serving figures of `millrace up` as it is: default configuration, modelled engines that take no time.

Several ways take the same loads in turn, round after round, so that other load on the machine disturbs all alike; the
median of the rounds is printed. What other load disturbs least is CPU time, by the kernel's clock of every process of
the cluster but the generator.

| way | what runs |
|---|---|
| `shipped` | `millrace up`, defaults |
| `jsq`, `round_robin` | the policy `join_shortest_queue`, or `round_robin`; no predictor |
| `dynamo`, `sglang` | NVIDIA Dynamo, or SGLang's gateway, in place of Millrace ([how](as_shipped_peers.py)) |

| part | what is measured |
|---|---|
| `serving` | short requests and streams as fast as they are served, and at 50 requests a second |
| `relayed` | streams beside SGLang's gateway |
| `rates` | CPU of a short request at 5 to 800 a second, and of a second without one, a share of which is in each |
| `messages` | ingress's CPU for a token message of a worker, its tokens' included: 64 streams, 2, 16, 64 instances |
| `placements` | CPU of a short request (32 at once) in all processes over that with `round_robin`, which asks nobody |

So a placement's price has all that forecasts need: lengths, questions, answers and outcomes, status for predictors.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from operator import sub, truediv
from pathlib import Path
from typing import Any

from msgspec import json, structs

from bench.as_shipped_peers import PEERS
from bench.as_shipped_ways import WAYS, Served
from bench.loadgen import Load
from bench.results_pages import report

Result = dict[str, Any]
PROMPT = "List five animals and say which of them is the largest."
RATES = (5, 20, 50, 200, 800)
#: Ways, numbers of instances, beginnings of loads' names, and what is summed up by part: values, quotients (/) or
#: differences (-) to those of the last way.
PARTS = {
    "serving": ("shipped,jsq", "2", "short,64,256,whole,stream", "/", "rate gateway_us all_us"),
    "relayed": ("shipped,jsq,sglang", "2", "64,256", "/", "rate gateway_us all_us"),
    "rates": ("shipped,jsq", "2", "idle,5 ,20 ,50 ,200 ,800 ", "", "gateway_us all_us"),
    "messages": ("shipped,jsq", "2,16,64", "64", "", "rate messages/s message_us"),
    "placements": ("shipped,jsq,round_robin", "2,16,64", "short", "-", "all_us gateway_us"),
}
WORDS = {"gateway_us": "µs of ingress", "all_us": "µs of all", "message_us": "µs of ingress a message"}
RELATIONS: dict[str, Callable[[float, float], float]] = {"": lambda own, _: own, "/": truediv, "-": sub}


def main() -> int:
    """Runs all ways in alternating rounds and prints one table per load."""
    parser = argparse.ArgumentParser(prog="python -m bench as_shipped", description=__doc__.splitlines()[0])
    parser.add_argument("--parts", choices=PARTS, default="serving")
    parser.add_argument("--seconds", type=float, default=4.0, help="measured time per load, longer for few requests")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--instances", help="numbers by comma (default of this and the next two: the part's)")
    parser.add_argument("--ways", help=f"of {', '.join(WAYS | PEERS)}")
    parser.add_argument("--loads", help="beginnings of loads' names, by comma")
    parser.add_argument("--apart", action="store_true", help="ingress, or a peer's, has the first core to itself")
    arguments = parser.parse_args()
    names, instances, wanted, *_ = PARTS[arguments.parts]
    ways, arguments.loads = (arguments.ways or names).split(","), tuple((arguments.loads or wanted).split(","))
    if arguments.apart:
        os.sched_setaffinity(0, set(range(1, os.cpu_count() or 1)))
    print(f"ways: {', '.join(ways)}{'; ingress on a core of its own' if arguments.apart else ''}")
    measured: dict[tuple[str, str], list[Result]] = {}
    for _ in range(arguments.rounds):
        for count in (arguments.instances or instances).split(","):
            for way in ways:
                for name, result in run_way(way, int(count), arguments).items():
                    load = f"{name}, {count} instances"
                    measured.setdefault((load, way), []).append(result)
                    print(f"  {load}, {way}: {row(result)}", file=sys.stderr, flush=True)
    for load in dict.fromkeys(load for load, _ in measured):
        print(f"{load}:")
        for way in ways:
            print(f"  {way:<11} {row(median_of(measured[load, way]))}")
    print(told := summary(arguments.parts, ways, measured))
    report(arguments.parts, told)
    return 0


def loads(port: int, seconds: float) -> dict[str, Load]:
    """The loads by name."""
    chat = {"model": "m", "messages": [{"role": "user", "content": PROMPT}], "ignore_eos": True}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    closed = Load(port=port, seconds=seconds, connections=32, body=chat | {"max_tokens": 4})
    streams = structs.replace(closed, body=chat | usage | {"max_tokens": 512})
    calm = structs.replace(closed, rate=50.0, connections=64)
    return {
        "short, 32 connections": closed,
        "64 streams": structs.replace(streams, connections=64),
        "256 streams": structs.replace(streams, connections=256),
        "whole, 50 a second": calm,
        "stream, 50 a second": structs.replace(calm, body=chat | usage | {"max_tokens": 32}),
        "idle": structs.replace(closed, connections=0),
        **{f"{n} a second": structs.replace(calm, rate=float(n), seconds=max(seconds, 60 / n)) for n in RATES},
    }


def run_way(way: str, instances: int, arguments: argparse.Namespace) -> dict[str, Result]:
    """One start of one way, with every load."""
    results = {}
    with tempfile.TemporaryDirectory() as folder, (WAYS | PEERS)[way](Path(folder), instances) as served:
        if arguments.apart:
            served.keep_apart()
        for name, load in loads(served.port, arguments.seconds).items():
            if name.startswith(arguments.loads):
                results[name] = measure(served, load)
    return results


def summary(part: str, ways: list[str], measured: Mapping[tuple[str, str], list[Result]]) -> str:
    """Each value by way: a number for each table in their order, the median of the rounds."""
    *_, sign, fields = PARTS[part]
    said = []
    for field in fields.split():
        for way in ways[: -1 if sign else None]:
            pairs = [
                zip(measured[load, way], measured[load, ways[-1]], strict=True) for load, of in measured if of == way
            ]
            numbers = [statistics.median(RELATIONS[sign](a[field], b[field]) for a, b in pair) for pair in pairs]
            shown = ", ".join(f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}" for number in numbers)
            said.append(f"{way}{f' {sign} {ways[-1]}' if sign else ''}: {WORDS.get(field, field)} {shown}")
    return "; ".join(said)


def measure(served: Served, load: Load) -> Result:
    """One load from a generator of its own process; with what each process used meanwhile."""
    decided, messages, before = asyncio.run(served.decisions()), served.token_messages(), served.cpu_s()
    command = [sys.executable, "-m", "bench.loadgen", json.encode(load).decode()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=load.seconds + load.warm_s + 60)
    result: Result = json.decode(done.stdout)
    after, now_decided = served.cpu_s(), asyncio.run(served.decisions())
    # The processes' clocks ran through the warm-up too, in which the generator does not count.
    share = load.seconds / (load.seconds + load.warm_s)
    used = {name: (cpu - before.get(name, 0.0)) * share for name, cpu in after.items()}
    streamed = load.body.get("stream", False)
    count = max(1, result["events" if streamed else "requests"]) if load.connections else load.seconds
    gateway = sum(cpu for name, cpu in used.items() if name.startswith("ingress"))
    per, messages = 1e6 / count, (served.token_messages() - messages) * share
    placed, fell_back = (now - then for now, then in zip(now_decided, decided, strict=True))
    return {
        "rate": count / load.seconds,
        "unit": "token" if streamed else "request" if load.connections else "second",
        "gateway_us": gateway * per,
        "all_us": sum(used.values()) * per,
        "by_policy": 1 - fell_back / placed if placed else 0.0,
        "p50_ms": result["ttft_ms_p50"] or result["latency_ms_p50"],
        "p99_ms": result["ttft_ms_p99"] or result["latency_ms_p99"],
        "errors": result["errors"],
        "messages/s": messages / load.seconds,
        "message_us": gateway * 1e6 / messages if messages else 0.0,
        "by_process": {name: round(cpu * per, 1) for name, cpu in used.items() if cpu * per >= 1},
    }


def median_of(found: list[Result]) -> Result:
    """Median of each figure, the processes' too."""
    numbers = found[0].keys() - {"by_process", "unit"}
    kept = {key: [each[key] for each in found if each[key] is not None] for key in numbers}
    figures = {key: statistics.median(values) if values else None for key, values in kept.items()}
    names = dict.fromkeys(name for each in found for name in each["by_process"])
    by_process = {n: statistics.median(each["by_process"].get(n, 0.0) for each in found) for n in names}
    return {**figures, "by_process": by_process, "unit": found[0]["unit"]}


def row(result: Result) -> str:
    """One line of the table."""
    processes = ", ".join(f"{name} {cpu:g}" for name, cpu in result["by_process"].items())
    return (
        f"{result['rate']:,.0f} {result['unit']}s/s; "
        f"CPU per {result['unit']}: gateway {result['gateway_us']:.1f} µs, all {result['all_us']:.1f} µs; "
        f"p50 {_ms(result['p50_ms'])}, p99 {_ms(result['p99_ms'])}; "
        f"{result['by_policy']:.1%} decided by the way's own policy; {result['errors']:.0f} errors; "
        f"{result['messages/s']:,.0f} token messages/s; [{processes}]"
    )


def _ms(value: float | None) -> str:
    """A time; a dash where no first token came while the load ran."""
    return "-" if value is None else f"{value:.2f} ms"


if __name__ == "__main__":
    sys.exit(main())
