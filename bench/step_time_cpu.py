"""Fresh runs of real vLLM on one core, against the sets that ship: steps, and end-to-end latency of whole rounds.

The rounds have another seed than those that the sets were fitted on, and run several times, a pass over all of them
after the other. How fast this machine is at the moment is one factor, which predictors learn while they run: the first
third of the rounds gives it here, the rest is judged with it. Three errors, since equal steps differ on a machine that
is shared: of steps as they came, beside what the median of the other passes would have been off (about the best that
can be had); of the least time of each step, which is the model's own error; of sums over 50 steps, which is what
forecasts are made of. All in processor time; ``wall`` says how much longer the steps took by the clock.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import msgspec
import numpy as np
from millrace.enginemodel.coefficients import load_coefficients
from millrace.enginemodel.step_time_models import LinearStepTime
from millrace.profiling import plan
from millrace.profiling.fitting import Errors, Sample, judge
from millrace.profiling.process import ProcessProfile
from millrace.profiling.profile import least, passes, sample
from millrace.profiling.records import Profiled, RoundRecord

from bench.engine.noise import Times, error, spread, sums, times
from papers.cascadeinfer.quality import sequence_records
from tests.testbed.modelled_profile import ModelledProfile

ROOT = Path(__file__).resolve().parent.parent
SETS = {"nano": "cpu-500k", "micro": "cpu-2m", "mini": "cpu-8m"}
PASSES = 7
ROUNDS = 36
#: Steps of a sum: about what a short answer takes.
SUM_STEPS = 50
EFFORT = plan.Effort(output_tokens=12, prompt_tokens_max=4096, mixed_rounds=2)


class Against(msgspec.Struct, frozen=True, kw_only=True):
    """Mean absolute errors of a model on some steps, and of equal steps against each other."""

    model: float
    noise: float


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """A set against a fresh run.

    Attributes:
        factor: The machine's pace, of steps as they came.
        wall: The same steps' wall-clock time over their processor time.
        as_is: Of steps as they came, without the factor.
        single, summed: Steps as they came, and sums of SUM_STEPS of them.
        least: The least time of each step, with a factor of its own.
        mean_e2e, each_e2e: The modelled engine's mean latency, signed, and the mean absolute error of each sequence's.
    """

    factor: float
    wall: float
    as_is: float
    single: Against
    summed: Against
    least: Errors
    mean_e2e: float
    each_e2e: float


def report(shapes: list[str], seed: int) -> None:
    """One line for each model."""
    print(
        f"{'model':<7}{'set':<10}{'steps':>6}{'factor':>8}{'wall':>6} |{'as it came':>11}{'noise':>7}{'as is':>7} |"
        f"{'least of ' + str(PASSES):>11}{'p50':>6}{'bias':>7} |{'sums of ' + str(SUM_STEPS):>11}{'noise':>7} |"
        f"{'mean e2e':>9}{'each':>7}"
    )
    for shape in shapes:
        print(line(shape, SETS[shape], check(load_coefficients(SETS[shape]), *measure(shape, seed))), flush=True)


def line(shape: str, name: str, found: Checked) -> str:
    """Of the table."""
    return (
        f"{shape:<7}{name:<10}{found.least.steps:>6}{found.factor:>8.2f}{found.wall:>6.2f} |"
        f"{found.single.model:>11.1%}{found.single.noise:>7.1%}{found.as_is:>7.1%} |"
        f"{found.least.mean:>11.1%}{found.least.median:>6.1%}{found.least.bias:>+7.1%} |"
        f"{found.summed.model:>11.1%}{found.summed.noise:>7.1%} |{found.mean_e2e:>+9.1%}{found.each_e2e:>7.1%}"
    )


def measure(shape: str, seed: int) -> tuple[Profiled, list[list[RoundRecord]]]:
    """Rounds of the real engine, each with its repeats."""
    config = {"name": "bench", "model": shape, "model_path": str(ROOT / "models" / f"millrace-{shape}")}
    engine = ProcessProfile([sys.executable, "-m", "services.worker.profile", json.dumps(config)])
    try:
        profiled = engine.profiled()
        planned = plan.rounds(profiled.parameters, EFFORT, seed)[:ROUNDS]
        return profiled, passes(engine, planned, PASSES, lambda done, total: None)
    finally:
        engine.close()


def check(model: LinearStepTime, profiled: Profiled, rounds: list[list[RoundRecord]]) -> Checked:
    """The model against rounds, the first third of which tell the machine's pace."""
    first, rest = rounds[: len(rounds) // 3], rounds[len(rounds) // 3 :]
    cpu = profiled.steady_clock
    factor = float(np.median(times(first, cpu=cpu) / _told(model, first)))
    least_factor = statistics.median(ns / model.duration_ns(batch) for batch, ns in _least(profiled, first))
    steps, told = times(rest, cpu=cpu), _told(model, rest)
    whole, each = end_to_end(profiled, rest, model.times(factor))
    return Checked(
        factor=factor,
        wall=float(times(rest, cpu=False).sum() / steps.sum()),
        as_is=error(told, steps),
        single=Against(model=error(factor * told, steps), noise=spread(steps)),
        summed=Against(
            model=error(sums(factor * told, SUM_STEPS), sums(steps, SUM_STEPS)), noise=spread(sums(steps, SUM_STEPS))
        ),
        least=judge(model.times(least_factor), _least(profiled, rest)),
        mean_e2e=whole,
        each_e2e=each,
    )


def _told(model: LinearStepTime, rounds: list[list[RoundRecord]]) -> Times:
    """Return the model's duration of each step, ns."""
    return np.array([model.duration_ns(step.batch) for repeats in rounds for step in repeats[0].steps], dtype=float)


def _least(profiled: Profiled, rounds: list[list[RoundRecord]]) -> list[Sample]:
    return [sample(step) for repeats in rounds for step in least(repeats, profiled.steady_clock, set())]


def end_to_end(profiled: Profiled, rounds: list[list[RoundRecord]], model: LinearStepTime) -> tuple[float, float]:
    """Return the error of the modelled engine's mean latency, and the mean absolute error of each sequence's."""
    modelled = ModelledProfile("set", model, profiled.parameters)
    pairs = []
    for repeats in rounds:
        told = sequence_records(modelled.run(repeats[0].round))
        for record in repeats:
            real = sequence_records(record, cpu=profiled.steady_clock)
            pairs += [(one.latency_ns, other.latency_ns) for one, other in zip(real, told, strict=True)]
    whole = sum(model_ns for _, model_ns in pairs) / sum(real_ns for real_ns, _ in pairs) - 1.0
    return whole, statistics.fmean(abs(model_ns / real_ns - 1.0) for real_ns, model_ns in pairs)
