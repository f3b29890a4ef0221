"""Latency that ingress, NATS, worker and dispatch add to a modelled engine: first token and time between tokens.

The same engine, the same prompts and the same Poisson arrivals twice: called directly in one process without any HTTP,
and through the whole of Millrace. With `speed` 0 an engine step takes no time, so what remains is the way there and
back; with 1 it takes the modelled time of an 8-million-parameter model on a CPU core.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
from millrace.actor.config import load_config
from millrace.actor.engine import EngineEvent, EngineSequence, EngineStepped
from millrace.actor.loop import run_to_end
from millrace.contracts.worker import Sampling

from bench.ingress_throughput import PROMPT
from bench.loadgen import Load, quantile
from services.ingress.api.tokenizer import ModelTokenizer
from services.worker.config import WorkerConfig
from services.worker.modelled import ModelledConfig, ModelledLiveEngine, modelled_parameters
from tests.testbed.local_cluster import MODEL, ClusterOptions, LocalCluster

TOKENS = 32


class DirectRun:
    """Sends arrivals straight to an engine and notes when tokens come."""

    def __init__(self, engine: ModelledLiveEngine, prompt: list[int]) -> None:
        self._engine = engine
        self._prompt = prompt
        self._last: dict[str, float] = {}
        self._begun: dict[str, float] = {}
        self.ttft_s: list[float] = []
        self.itl_s: list[float] = []

    def hear(self, event: EngineEvent) -> None:
        """Listener of the engine."""
        if not isinstance(event, EngineStepped):
            return
        now = time.perf_counter()
        for output in event.outputs:
            if output.sequence in self._begun:
                self.ttft_s.append(now - self._begun.pop(output.sequence))
            else:
                self.itl_s.append(now - self._last[output.sequence])
            self._last[output.sequence] = now

    async def run(self, rate: float, seconds: float, seed: int) -> None:
        """Arrivals of a Poisson process."""
        rng = random.Random(seed)
        begun = at = time.perf_counter()
        number = 0
        sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)
        while at < begun + seconds:
            at += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            number += 1
            self._begun[str(number)] = at
            self._engine.add(EngineSequence(sequence=str(number), prompt_token_ids=self._prompt, sampling=sampling))
        await asyncio.sleep(1)


async def direct(worker: WorkerConfig, prompt: list[int], rate: float, seconds: float) -> DirectRun:
    """The engine alone."""
    modelled = msgspec.convert(worker.modelled | {"tokenizer": ""}, ModelledConfig)
    engine = ModelledLiveEngine(modelled, modelled_parameters(worker))
    run = DirectRun(engine, prompt)
    await engine.start(run.hear)
    await run.run(rate, seconds, seed=1)
    await engine.stop()
    return run


def through_millrace(cluster: LocalCluster, rate: float, seconds: float, core: int) -> dict[str, Any]:
    """The same through the API."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    load = Load(port=cluster.port, path="/v1/chat/completions", body=body, connections=256, rate=rate, seconds=seconds)
    command = ["taskset", "-c", str(core), sys.executable, "-m", "bench.loadgen", msgspec.json.encode(load).decode()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds + 60)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def main() -> int:
    """Runs both ways at both speeds and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m bench ingress_latency", description=__doc__)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--rate", type=float, default=50.0)
    parser.add_argument(
        "--predictors", type=int, default=1, help="0: nobody is asked, the fallback policy decides (default 1)"
    )
    arguments = parser.parse_args()
    print(f"predictors: {arguments.predictors}")
    cores = sorted(os.sched_getaffinity(0))
    for speed in (0.0, 1.0):
        with tempfile.TemporaryDirectory() as folder:
            options = ClusterOptions(
                folder=Path(folder),
                speed=speed,
                ingress_cores=(cores[0],),
                other_cores=(cores[-1],),
                predictors=arguments.predictors,
            )
            with LocalCluster(options) as cluster:
                result = through_millrace(cluster, arguments.rate, arguments.seconds, cores[-1])
                tokenizer = ModelTokenizer.load(cluster.model_folder)
                worker = load_config(WorkerConfig, Path(folder) / "worker-0.json")
            assert tokenizer.template is not None
            text = tokenizer.template.render([{"role": "user", "content": PROMPT}], add_generation_prompt=True)
            prompt = tokenizer.encode(text, special=False)
            os.sched_setaffinity(0, {cores[-1]})
            # The folder is gone; the engine's words do not matter here.
            alone = run_to_end(direct(worker, prompt, arguments.rate, arguments.seconds))
            os.sched_setaffinity(0, set(cores))
        print(table(speed, result, alone), flush=True)
    return 0


def table(speed: float, result: dict[str, Any], alone: DirectRun) -> str:
    """Lines for one speed, milliseconds."""
    lines = [f"speed {speed:g}: {result['requests']} requests, {result['errors']} errors"]
    for name, values in (("ttft", alone.ttft_s), ("itl", alone.itl_s)):
        for label, share in (("p50", 0.5), ("p99", 0.99)):
            through, straight = result[f"{name}_ms_{label}"], quantile(values, share) * 1e3
            lines.append(
                f"  {name} {label}: {through:.2f} ms through Millrace, {straight:.2f} ms engine alone, "
                f"{through - straight:+.2f} ms added"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
