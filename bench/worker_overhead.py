"""Real vLLM behind a worker and NATS against the same vLLM called directly: throughput, TTFT, ITL.

The engine has one core to itself; everything else (driver, worker process, nats-server) shares another. Both ways
decode the same greedy requests in a closed loop, tokens only. *Direct* is stock vLLM: ``AsyncLLM.generate`` with
vLLM's own scheduler. Rounds alternate; medians are shown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 64
#: A request's first-token moment, one per later token message, and its number of tokens.
Ask = Callable[[int], Awaitable[tuple[float, list[float], int]]]


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="models/millrace-mini")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=6.0, help="length of one round at one concurrency")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--way", choices=["direct", "worker"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.model = os.path.realpath(arguments.model)
    if arguments.way:
        print("FIGURES" + json.dumps(asyncio.run(_WAYS[arguments.way](arguments))))
        return 0
    rounds: dict[str, list[Any]] = {"direct": [], "worker": []}
    for _ in range(arguments.rounds):
        for way, figures in rounds.items():
            figures.append(_round(way, sys.argv[1:]))
    print(f"{'concurrency':>11} {'way':>7} {'tok/s':>8} {'ratio':>6}", end=" ")
    print(f"{'TTFT p50 ms':>12} {'p99':>7} {'ITL p50':>8} {'p99':>7}")
    for index, concurrency in enumerate(arguments.concurrency):
        direct = 0.0
        for way, figures in rounds.items():
            row = [statistics.median(values) for values in zip(*[figure[index] for figure in figures], strict=True)]
            direct = direct or row[0]
            latencies = f"{row[1]:>12.1f} {row[2]:>7.1f} {row[3]:>8.2f} {row[4]:>7.2f}"
            print(f"{concurrency:>11} {way:>7} {row[0]:>8.0f} {row[0] / direct:>6.3f} {latencies}")
    return 0


def _round(way: str, words: list[str]) -> list[list[float]]:
    command = [sys.executable, "-m", "bench.worker_overhead", *words, "--way", way]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FIGURES")]
    if not lines:
        raise SystemExit(done.stderr[-3000:])
    figures: list[list[float]] = json.loads(lines[0].removeprefix("FIGURES"))
    return figures


def _cores() -> tuple[list[int], list[int]]:
    """Cores of everything else, and the engine's."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[:1], cores[-1:]


async def _direct(arguments: argparse.Namespace) -> list[list[float]]:
    from services.worker.vllm_engine import environment

    environment.prepare()
    import torch
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor import Executor

    from services.worker.vllm_engine.process import children_on

    rest, engine_cores = _cores()
    config = AsyncEngineArgs(
        model=arguments.model,
        block_size=32,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=256 << 20,
        enforce_eager=True,
        distributed_executor_backend="uni",
        disable_log_stats=True,
    ).create_engine_config()
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    torch.set_num_threads(1)
    with children_on(engine_cores):
        llm = AsyncLLM(
            vllm_config=config, executor_class=Executor.get_class(config), log_stats=False, log_requests=False
        )
    os.sched_setaffinity(0, rest)
    sampling = SamplingParams(
        max_tokens=arguments.tokens,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )

    async def ask(serial: int) -> tuple[float, list[float], int]:
        moments, tokens = [], 0
        async for output in llm.generate(tokens_input(_prompt(serial)), sampling, f"r{serial}"):
            moments.append(time.perf_counter())
            tokens += len(output.outputs[0].token_ids)
        return moments[0], moments, tokens

    figures = await _measure(ask, arguments)
    llm.shutdown(timeout=0.5)
    return figures


async def _worker(arguments: argparse.Namespace) -> list[list[float]]:
    from tests.testbed.nats_process import NatsProcess
    from tests.testbed.worker_rig import create_buckets, start_worker, write_config

    rest, engine_cores = _cores()
    os.sched_setaffinity(0, rest)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = NatsProcess(folder)
        server.start()
        await create_buckets(server.url, "bench")
        config = write_config(
            folder,
            "w0",
            server.url,
            "bench",
            model_path=arguments.model,
            kv_bytes=256 << 20,
            engine_cores=engine_cores,
            worker_cores=rest,
        )
        process = start_worker(config)
        try:
            return await _through(server.url, arguments)
        finally:
            process.terminate()
            process.wait(timeout=30)
            server.close()


async def _through(url: str, arguments: argparse.Namespace) -> list[list[float]]:
    from millrace.contracts.worker import Sampling

    from tests.testbed.worker_rig import FakeIngress, Stream

    sampling = Sampling(max_tokens=arguments.tokens, temperature=0.0, ignore_eos=True)
    async with FakeIngress(url, "bench") as ingress:
        await ingress.up("w0")

        async def ask(serial: int) -> tuple[float, list[float], int]:
            name = f"r{serial}.0"
            stream = ingress.streams[name] = _TimedStream(_prompt(serial), sampling)
            await ingress._place("w0", name)
            await stream.done.wait()
            del ingress.streams[name]
            return stream.moments[0], stream.moments, len(stream.tokens)

        class _TimedStream(Stream):
            def __init__(self, prompt: list[int], sampling: Sampling) -> None:
                super().__init__(prompt, sampling)
                self.moments: list[float] = []
                self.done = asyncio.Event()

            def take(self, chunk: Any) -> bool:
                self.moments.append(time.perf_counter())
                whole = super().take(chunk)
                if self.finish is not None:
                    self.done.set()
                return whole

        return await _measure(ask, arguments)


def _prompt(serial: int) -> list[int]:
    """Prompts share no prefix: their first token tells them apart."""
    return [3 + serial % 600, *(3 + (serial * 7 + index) % 600 for index in range(PROMPT_TOKENS - 1))]


async def _measure(ask: Ask, arguments: argparse.Namespace) -> list[list[float]]:
    """Per concurrency: tokens per second, TTFT p50 and p99, ITL p50 and p99 in milliseconds."""
    serial = iter(range(10**9))
    await asyncio.gather(*[ask(next(serial)) for _ in range(4)])
    return [await _level(ask, serial, concurrency, arguments.seconds) for concurrency in arguments.concurrency]


async def _level(ask: Ask, serial: Iterator[int], concurrency: int, seconds: float) -> list[float]:
    first: list[float] = []
    between: list[float] = []
    counts: list[int] = []
    started = time.perf_counter()

    async def user() -> None:
        while time.perf_counter() < started + seconds:
            asked = time.perf_counter()
            moment, moments, count = await ask(next(serial))
            first.append((moment - asked) * 1e3)
            between.extend((b - a) * 1e3 for a, b in pairwise(moments))
            counts.append(count)

    await asyncio.gather(*[user() for _ in range(concurrency)])
    rate = sum(counts) / (time.perf_counter() - started)
    return [rate, *_percentiles(first), *_percentiles(between)]


def _percentiles(values: list[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)]


_WAYS = {"direct": _direct, "worker": _worker}


if __name__ == "__main__":
    raise SystemExit(main())
