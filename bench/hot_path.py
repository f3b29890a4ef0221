"""Ingress's whole way of a request in one thread: HTTP, tag, forecasts, decision, submission, tokens, answer.

The process is composed as `millrace up` composes it, predictor and tagger hosted, traces as shipped. Sockets and
nats-server are replaced: bytes of requests are fed to the connection, and what ingress publishes goes to engines here
that answer at once, in wire form both ways. The clock advances with the requests. So the figure is user-space CPU time
of ingress alone, hardly disturbed by what else runs. ``--counted`` counts instructions, by valgrind's callgrind, which
nothing else changes; `bench --check` compares them with those of an earlier commit.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from bench import instructions
from bench.hot_path_clock import RequestClock, run_by
from bench.hot_path_rig import API, HotPathRig

T = TypeVar("T")
#: Requests before anything is measured.
WARM_REQUESTS = 200
#: Requests that are timed together.
SLICE_REQUESTS = 20


def main() -> int:
    """Prints one line per number of instances."""
    parser = argparse.ArgumentParser(prog="python -m bench hot_path", description=__doc__.splitlines()[0])
    parser.add_argument("--instances", default="2,16,64")
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--policy", default="forecast")
    parser.add_argument("--tokens", type=int, default=4, help="output tokens of each request")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--steps", type=int, default=1, help="engine steps, and messages, that these tokens come in")
    parser.add_argument("--api", choices=API, default="chat")
    parser.add_argument("--open", type=int, default=32, help="requests that are open at a time")
    parser.add_argument("--parsed", action="store_true", help="the output goes through a parser process")
    parser.add_argument("--counted", action="store_true", help="instructions, by valgrind, in place of CPU time")
    parser.add_argument("--under-callgrind", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.under_callgrind:
        _run(_counted, int(arguments.instances), arguments)
        return 0
    for instances in map(int, arguments.instances.split(",")):
        print(f"{instances:3} instances, {arguments.policy}: {_told(instances, arguments)}", flush=True)
    return 0


def _told(instances: int, arguments: argparse.Namespace) -> str:
    if not arguments.counted:
        return f"{_run(_timed, instances, arguments):7.1f} µs per request"
    words = [*sys.argv[1:], "--under-callgrind", "--instances", str(instances)]
    return f"{instructions.counted('bench.hot_path', words) / arguments.requests:,.0f} instructions per request"


#: Measures a rig that is warm.
Measure = Callable[[HotPathRig, argparse.Namespace], Coroutine[Any, Any, T]]


def _run(measure: Measure[T], instances: int, arguments: argparse.Namespace) -> T:
    clock = RequestClock()
    with tempfile.TemporaryDirectory() as folder:
        rig = HotPathRig(
            Path(folder),
            clock,
            instances=instances,
            policy=arguments.policy,
            steps=arguments.steps,
            parsed=arguments.parsed,
            opened=arguments.open,
        )
        return run_by(_warmed(rig, measure, arguments), clock)


async def _warmed(rig: HotPathRig, measure: Measure[T], arguments: argparse.Namespace) -> T:
    await rig.start()
    try:
        await _serve(rig, WARM_REQUESTS, arguments)
        gc.collect()
        gc.freeze()  # A full collection walks all that the imports left, and it is luck whether one falls into a run.
        return await measure(rig, arguments)
    finally:
        gc.unfreeze()
        rig.close()


async def _serve(rig: HotPathRig, requests: int, arguments: argparse.Namespace) -> None:
    await rig.serve(requests, api=arguments.api, tokens=arguments.tokens, stream=arguments.stream)


async def _timed(rig: HotPathRig, arguments: argparse.Namespace) -> float:
    """CPU microseconds per request, the median of slices."""
    slices = [await _served_ns(rig, SLICE_REQUESTS, arguments) for _ in range(-(-arguments.requests // SLICE_REQUESTS))]
    return statistics.median(slices) / SLICE_REQUESTS / 1e3


async def _served_ns(rig: HotPathRig, requests: int, arguments: argparse.Namespace) -> int:
    """CPU time of so many requests without that of the engines."""
    begun = time.thread_time_ns()
    await _serve(rig, requests, arguments)
    taken = time.thread_time_ns() - begun
    rig.check(requests)
    return taken - rig.engines_ns


async def _counted(rig: HotPathRig, arguments: argparse.Namespace) -> None:
    """Count the requests, engines included. Ends the process."""
    instructions.begin()
    await _serve(rig, arguments.requests, arguments)
    rig.check(arguments.requests)
    instructions.end()


if __name__ == "__main__":
    sys.exit(main())
