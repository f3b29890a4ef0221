"""Cost of a forecast by size of the instance.

Processor time of one question on an instance that decodes and has a queue: ``load`` of a snapshot, the first forecast
after it (which rolls the instance to now and computes its future without the candidate), further forecasts of the same
state.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable
from functools import partial

import msgspec
from millrace.contracts.status import SequenceState, SequenceStatus, StatusSnapshot
from millrace.enginemodel.coefficients import load_coefficients
from millrace.enginemodel.forecast.forecaster import Forecaster
from millrace.enginemodel.forecast.question import Candidate
from millrace.enginemodel.parameters import EngineParameters

from bench.results_pages import report
from tests.testbed.messages import plain_snapshot

AT_NS = 1_700_000_000_000_000_000
SIZES = [(running, waiting) for running in (8, 64, 256) for waiting in (0, 32, 128)]
REPORTED = (64, 32)


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m bench forecast", description=__doc__)
    parser.add_argument("--questions", type=int, default=2000, help="per size")
    parser.add_argument("--step-time", default="a100-llama-3-8b")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(f"seed {options.seed}, step time {options.step_time}\n")
    times(options)
    print()
    return 0


def times(options: argparse.Namespace) -> None:
    """Processor time by state size, us."""
    print(f"{'':>15}  {'forecast':^17}  {'the first':^17}  {'no delay':>8}  {'load':>6}")
    head = f"{'p50':>8} {'p99':>8}"
    print(f"{'running+waiting':>15}  {head}  {head}  {'p50':>8}  {'p50':>6}")
    for running, waiting in SIZES:
        rng = random.Random(options.seed)
        parameters = limits(running)
        cost = load_coefficients(options.step_time).cost(parameters)
        states = [state(rng, running, waiting, parameters) for _ in range(20)]
        compiled = measured(Forecaster(cost, parameters), states, options.questions, rng)
        if (running, waiting) == REPORTED:
            report("forecast", f"{' / '.join(percentiles(compiled['again']).split())} µs")
        row = f"{running:>8}+{waiting:<6}  {percentiles(compiled['again'])}  {percentiles(compiled['first'])}"
        row += f"  {statistics.median(compiled['bare']):8.1f}  {statistics.median(compiled['load']):6.1f}"
        print(row, flush=True)


def limits(running: int) -> EngineParameters:
    """An engine whose running batch is full."""
    return EngineParameters(
        max_model_len=8192,
        max_sequences=max(48, running),
        token_budget=2048,
        blocks_total=max(600, running * 200),
        prefix_caching=False,
    )


def state(rng: random.Random, running: int, waiting: int, parameters: EngineParameters) -> StatusSnapshot:
    """Decodes somewhere in their outputs, and a queue; lengths log-normal, as chats have them."""
    rows = [status(rng, f"{index}.0", decodes=index < running) for index in range(running + waiting)]
    held = sum(row.blocks for row in rows[:running])
    return plain_snapshot(
        "i",
        at_ns=AT_NS,
        running=rows[:running],
        waiting=rows[running:],
        blocks_free=max(0, parameters.blocks_total - held),
        blocks_total=parameters.blocks_total,
    )


def status(rng: random.Random, name: str, *, decodes: bool) -> SequenceStatus:
    """A sequence that decodes, at a random point of its output, or one that waits."""
    prompt, expected = length(rng, 220, 1.0), length(rng, 200, 0.8)
    if not decodes:
        return SequenceStatus(name, SequenceState.WAITING, prompt, 0, 0, 2000, 0, AT_NS, expected)
    output = rng.randrange(1, expected + 1)
    computed = prompt + output - 1
    return SequenceStatus(
        name, SequenceState.RUNNING, prompt, computed, output, 2000, -(-computed // 16), AT_NS, expected
    )


def length(rng: random.Random, mean: float, sigma: float) -> int:
    """Log-normal with this mean, within what fits any engine here."""
    return max(1, min(3000, round(mean * rng.lognormvariate(-(sigma**2) / 2, sigma))))


def measured(
    forecaster: Forecaster, states: list[StatusSnapshot], questions: int, rng: random.Random
) -> dict[str, list[float]]:
    """Processor times of loads, first and further questions, us."""
    found: dict[str, list[float]] = {"load": [], "first": [], "again": [], "bare": []}
    gc.disable()
    for index in range(questions):
        snapshot = states[index % len(states)]
        candidate = Candidate(prompt_tokens=length(rng, 220, 1.0), expected_output_tokens=length(rng, 200, 0.8))
        now_ns = AT_NS + rng.randrange(50_000_000)
        found["load"].append(timed_us(partial(forecaster.load, snapshot)))
        forecaster.advance(now_ns)
        found["first"].append(timed_us(partial(forecaster.forecast, candidate)))
        other = msgspec.structs.replace(candidate, prompt_tokens=candidate.prompt_tokens + 1)
        found["again"].append(timed_us(partial(forecaster.forecast, other)))
        found["bare"].append(timed_us(partial(forecaster.forecast, other, with_delay=False)))
    gc.enable()
    return found


def timed_us(act: Callable[[], object]) -> float:
    """Processor time of one call."""
    begin = time.thread_time_ns()
    act()
    return (time.thread_time_ns() - begin) / 1000


def percentiles(values: list[float]) -> str:
    """Median and P99."""
    ordered = sorted(values)
    return f"{statistics.median(ordered):8.1f} {ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]:8.1f}"
