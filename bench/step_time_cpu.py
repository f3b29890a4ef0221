"""Fresh runs of real vLLM on one core, against the sets that ship: steps, and end-to-end latency of whole rounds.

The rounds have another seed than those that the sets were fitted on. Times are processor time, least of the repeats.
How fast this machine is at the moment is one factor, which predictors learn while they run: the first third of the
rounds gives it here, the rest is judged without it ("as is") and with it. Each round is run again on the modelled
engine with the shipped set; latencies of its sequences are compared.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

from millrace.enginemodel.coefficients import load_coefficients
from millrace.enginemodel.steptime import LinearStepTime
from millrace.profiling import plan
from millrace.profiling.fitting import Sample, judge
from millrace.profiling.modelled import ModelledProfile
from millrace.profiling.process import ProcessProfile
from millrace.profiling.profile import least, sample
from millrace.profiling.records import Profiled, RoundRecord, StepRecord, sequence_records

ROOT = Path(__file__).resolve().parent.parent
SETS = {"nano": "cpu-500k", "micro": "cpu-2m", "mini": "cpu-8m"}
REPEATS = 3
ROUNDS = 24
EFFORT = plan.Effort(output_tokens=12, prompt_tokens_max=4096, mixed_rounds=2)


def report(shapes: list[str], seed: int) -> None:
    """One line for each model."""
    print(
        f"{'model':<8}{'set':<10}{'steps':>7}{'MAPE as is':>12}{'factor':>8}{'MAPE':>8}{'p50':>8}{'bias':>8}"
        f"{'mean e2e':>10}{'each e2e':>10}"
    )
    for shape in shapes:
        _report(shape, SETS[shape], seed)


def _report(shape: str, name: str, seed: int) -> None:
    profiled, rounds = measure(shape, seed)
    model = load_coefficients(name)
    first, rest = rounds[: len(rounds) // 3], rounds[len(rounds) // 3 :]
    factor = statistics.median(ns / model.duration_ns(batch) for batch, ns in _samples(profiled, first))
    steps = _samples(profiled, rest)
    errors = judge(model.times(factor), steps)
    whole, each = end_to_end(profiled, rest, model.times(factor))
    print(
        f"{shape:<8}{name:<10}{errors.steps:>7}{judge(model, steps).mean:>12.1%}{factor:>8.2f}{errors.mean:>8.1%}"
        f"{errors.median:>8.1%}{errors.bias:>+8.1%}{whole:>+10.1%}{each:>10.1%}",
        flush=True,
    )


def _samples(profiled: Profiled, rounds: list[list[RoundRecord]]) -> list[Sample]:
    return [sample(step) for repeats in rounds for step in least(repeats, profiled.steady_clock, set())]


def measure(shape: str, seed: int) -> tuple[Profiled, list[list[RoundRecord]]]:
    """Rounds of the real engine, each several times."""
    config = {"name": "bench", "model": shape, "model_path": str(ROOT / "models" / f"millrace-{shape}")}
    engine = ProcessProfile([sys.executable, "-m", "services.worker.profile", json.dumps(config)])
    try:
        profiled = engine.profiled()
        planned = plan.rounds(profiled.parameters, EFFORT, seed)[:ROUNDS]
        return profiled, [[engine.run(load) for _ in range(REPEATS)] for load in planned]
    finally:
        engine.close()


def end_to_end(profiled: Profiled, rounds: list[list[RoundRecord]], model: LinearStepTime) -> tuple[float, float]:
    """How far the modelled engine's mean latency is off, and the mean absolute error of each sequence's."""
    modelled = ModelledProfile("set", model, profiled.parameters)
    pairs = [
        (real.latency_ns, model_of.latency_ns)
        for repeats in rounds
        for real, model_of in zip(
            sequence_records(_least(repeats), cpu=profiled.steady_clock),
            sequence_records(modelled.run(repeats[0].round)),
            strict=True,
        )
    ]
    whole = sum(model_ns for _, model_ns in pairs) / sum(real_ns for real_ns, _ in pairs) - 1.0
    return whole, statistics.fmean(abs(model_ns / real_ns - 1.0) for real_ns, model_ns in pairs)


def _least(repeats: list[RoundRecord]) -> RoundRecord:
    """The round with the least time of each step."""
    steps = [_shortest(same) for same in zip(*(record.steps for record in repeats), strict=True)]
    return RoundRecord(round=repeats[0].round, steps=steps)


def _shortest(same: tuple[StepRecord, ...]) -> StepRecord:
    return min(same, key=lambda step: step.cpu_ns)
