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
import statistics
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from bench.calibration import calibration_us
from bench.hot_path_rig import HotPathRig

#: Requests before anything is measured, and of one slice.
WARM_REQUESTS, SLICE_REQUESTS = 200, 20


def main() -> int:
    """Prints one line per number of instances."""
    parser = argparse.ArgumentParser(prog="python -m bench hot_path", description=__doc__.splitlines()[0])
    parser.add_argument("--instances", default="2,16,64")
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--policy", default="forecast")
    parser.add_argument("--tokens", type=int, default=4, help="output tokens of each request")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--profile", action="store_true", help="print the costliest functions instead")
    arguments = parser.parse_args()
    if arguments.profile:
        return _profiled(arguments)
    for instances in map(int, arguments.instances.split(",")):
        cost = measured(instances, arguments)
        told = f"{cost.request_us:7.1f} µs per request, ratio {cost.ratio:.3f}"
        print(f"{instances:3} instances, {arguments.policy}: {told}")
    return 0


class HotPathCost(msgspec.Struct, frozen=True):
    """Medians over slices.

    Attributes:
        request_us: CPU microseconds per request.
        ratio: Of them to a round of the calibration loop, which runs between the slices.
    """

    request_us: float
    ratio: float


def measured(instances: int, arguments: argparse.Namespace) -> HotPathCost:
    """Requests and calibration in turn, in slices so short that what disturbs one disturbs the other."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_slices(Path(folder), instances, arguments))


async def _slices(folder: Path, instances: int, arguments: argparse.Namespace) -> HotPathCost:
    rig = HotPathRig(folder, instances=instances, policy=arguments.policy)
    await rig.start()
    costs, calibrations = [], []
    try:
        await rig.serve(WARM_REQUESTS, tokens=arguments.tokens, stream=arguments.stream)
        calibration_us(WARM_REQUESTS)
        for _ in range(max(1, arguments.requests // SLICE_REQUESTS)):
            costs.append(await _slice_us(rig, arguments))
            calibrations.append(calibration_us())
    finally:
        rig.close()
    request_us = statistics.median(costs)
    return HotPathCost(request_us, request_us / statistics.median(calibrations))


async def _slice_us(rig: HotPathRig, arguments: argparse.Namespace) -> float:
    begun = time.thread_time_ns()
    await rig.serve(SLICE_REQUESTS, tokens=arguments.tokens, stream=arguments.stream)
    taken = time.thread_time_ns() - begun
    rig.check(SLICE_REQUESTS)
    return (taken - rig.engines_ns) / 1e3 / SLICE_REQUESTS


def _profiled(arguments: argparse.Namespace) -> int:
    profile = cProfile.Profile()
    with tempfile.TemporaryDirectory() as folder:
        profile.runcall(asyncio.run, _slices(Path(folder), int(arguments.instances.split(",")[0]), arguments))
    pstats.Stats(profile).sort_stats("tottime").print_stats(45)
    return 0


if __name__ == "__main__":
    sys.exit(main())
