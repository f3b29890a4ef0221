"""Cost of the modelled engine itself: one step of decodes, and many engines in one process in wall-clock time.

Steps: processor time, least of repeated runs. Engines: processor time of a process whose engines are paced as A100s and
all decode; fewer than 90 steps per second each mean that the machine had no time for them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import uvloop
from millrace.actor.engine import EngineEvent, EngineSequence, EngineStepped
from millrace.contracts.worker import Sampling
from millrace.enginemodel.engine import ModelledEngine
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_time_models import ConstantStepTime

from services.worker.modelled import ModelledConfig, ModelledLiveEngine

STEPS = 400
REPEATS = 7
SNAPSHOT_INTERVAL_NS = 20_000_000


def main() -> int:
    """Prints both tables."""
    parser = argparse.ArgumentParser(prog="python -m bench engine_model", description=__doc__)
    parser.add_argument("--sequences", type=int, nargs="*", default=[1, 8, 64, 256])
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=4.0)
    options = parser.parse_args()
    print(f"{'sequences':>9}  {'schedule us':>11}  {'step us':>8}  {'with snapshot us':>16}  {'us per sequence':>15}")
    for count in options.sequences:
        schedule = least_us(count, _schedule)
        step = least_us(count, lambda engine: _step(engine, with_snapshot=False))
        full = least_us(count, lambda engine: _step(engine, with_snapshot=True))
        print(f"{count:9}  {schedule:11.1f}  {step:8.1f}  {full:16.1f}  {step / count:15.2f}")
    print(f"\n{'engines':>9}  {'sequences each':>14}  {'steps/s':>8}  {'tokens/s':>9}  {'cores used':>10}")
    for count in (4, 16, 32):
        steps, tokens, cores = uvloop.run(fleet(options.engines, count, options.seconds))
        print(f"{options.engines:9}  {count:14}  {steps:8.0f}  {tokens:9.0f}  {cores:10.2f}")
    return 0


def _schedule(engine: ModelledEngine) -> None:
    """The scheduler alone: what a forecast needs."""
    for sequence in engine.scheduler.schedule().sampling:
        sequence.append(97)


def _step(engine: ModelledEngine, *, with_snapshot: bool) -> None:
    engine.begin_step(0)
    engine.complete_step(0, with_snapshot=with_snapshot)


def least_us(count: int, act: Callable[[ModelledEngine], object]) -> float:
    """Least over runs of the mean time of ``act`` on an engine that decodes ``count`` sequences, us."""
    means = []
    for _ in range(REPEATS):
        engine = decoding(count)
        begin = time.process_time()
        for _ in range(STEPS):
            act(engine)
        means.append((time.process_time() - begin) / STEPS * 1e6)
    return min(means)


def decoding(count: int) -> ModelledEngine:
    """An engine whose ``count`` sequences have all computed their prompts."""
    parameters = EngineParameters(max_sequences=count, blocks_total=100 * count + 600, token_budget=2048)
    engine = ModelledEngine(parameters, ConstantStepTime(1))
    for index in range(count):
        engine.add(sequence(f"{index}.0", 20 + index))
    while len(engine.scheduler.running) < count or any(s.computed < s.prompt_tokens for s in engine.scheduler.running):
        engine.step(0)
    return engine


def sequence(name: str, prompt_tokens: int) -> EngineSequence:
    """A sequence that decodes for longer than any measurement."""
    sampling = Sampling(max_tokens=4000, ignore_eos=True)
    prompt = [97 + (len(name) + index) % 26 for index in range(prompt_tokens)]
    return EngineSequence(sequence=name, prompt_token_ids=prompt, sampling=sampling)


async def fleet(engines: int, sequences: int, seconds: float) -> tuple[float, float, float]:
    """Steps and tokens per second, and cores used, of so many live engines in this process."""
    import asyncio

    counts = [0, 0]

    def listen(event: EngineEvent) -> None:
        if isinstance(event, EngineStepped):
            counts[0] += 1
            counts[1] += len(event.outputs)

    started = []
    config = ModelledConfig(coefficients="a100-llama-3-8b", snapshot_interval_ns=SNAPSHOT_INTERVAL_NS)
    for index in range(engines):
        engine = ModelledLiveEngine(config)
        await engine.start(listen)
        for number in range(sequences):
            engine.add(sequence(f"{index}.{number}", 100))
        started.append(engine)
    await asyncio.sleep(1.0)  # prompts are done
    counts[:] = [0, 0]
    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.sleep(seconds)
    elapsed = time.perf_counter() - wall
    used = (time.process_time() - cpu) / elapsed
    for engine in started:
        await engine.stop()
    return counts[0] / elapsed, counts[1] / elapsed, used
