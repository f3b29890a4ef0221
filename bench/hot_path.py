"""Ingress's whole way of a request in one thread: HTTP, tag, forecasts, decision, submission, tokens, answer.

The process is composed as `millrace up` composes it, predictor and tagger hosted, traces as shipped. Sockets and
nats-server are replaced: bytes of requests are fed to the connection, and what ingress publishes goes to engines here
that answer at once, in wire form both ways. So the figure is user-space CPU time of ingress alone, hardly disturbed by
what else runs; `bench --check` compares its ratio to a calibration loop with the one that is kept.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import sys
import tempfile
import time
from pathlib import Path

from bench.hot_path_rig import HotPathRig

#: Of the calibration loop: enough for its time to be known to a percent.
CALIBRATION_TURNS = 300_000


def main() -> int:
    """Prints one line per number of instances."""
    parser = argparse.ArgumentParser(prog="python -m bench hot_path", description=__doc__.splitlines()[0])
    parser.add_argument("--instances", default="2,16,64")
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--policy", default="forecast")
    parser.add_argument("--tokens", type=int, default=4, help="output tokens of each request")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--profile", action="store_true", help="print the costliest functions instead")
    arguments = parser.parse_args()
    if arguments.profile:
        return _profiled(arguments)
    for instances in map(int, arguments.instances.split(",")):
        found = [measured(arguments, instances) for _ in range(arguments.repeats)]
        best_us, ratio = min(us for us, _ in found), min(ratio for _, ratio in found)
        print(f"{instances:3} instances, {arguments.policy}: {best_us:7.1f} µs per request, ratio {ratio:.3f}")
    return 0


def measured(arguments: argparse.Namespace, instances: int) -> tuple[float, float]:
    """CPU microseconds per request, and their ratio to the calibration loop's."""
    before = calibration_us()
    with tempfile.TemporaryDirectory() as folder:
        request_us = asyncio.run(_run(Path(folder), arguments, instances))
    return request_us, request_us / min(before, calibration_us())


async def _run(folder: Path, arguments: argparse.Namespace, instances: int) -> float:
    rig = HotPathRig(folder, instances=instances, policy=arguments.policy)
    await rig.start()
    try:
        await rig.serve(arguments.requests // 5, tokens=arguments.tokens, stream=arguments.stream)
        begun = time.thread_time_ns()
        await rig.serve(arguments.requests, tokens=arguments.tokens, stream=arguments.stream)
        taken = time.thread_time_ns() - begun
        rig.check(arguments.requests)
    finally:
        rig.close()
    return (taken - rig.engines_ns) / 1e3 / int(arguments.requests)


def calibration_us() -> float:
    """CPU time of a loop of what ingress's code is made of: calls, attributes, dictionaries, strings."""
    known: dict[str, int] = {}
    begun = time.thread_time_ns()
    for turn in range(CALIBRATION_TURNS):
        key = f"k{turn & 255}"
        known[key] = known.get(key, 0) + len(key)
    return (time.thread_time_ns() - begun) / 1e3 / (CALIBRATION_TURNS / 1000)


def _profiled(arguments: argparse.Namespace) -> int:
    profile = cProfile.Profile()
    with tempfile.TemporaryDirectory() as folder:
        profile.runcall(asyncio.run, _run(Path(folder), arguments, int(arguments.instances.split(",")[0])))
    pstats.Stats(profile).sort_stats("tottime").print_stats(45)
    return 0


if __name__ == "__main__":
    sys.exit(main())
