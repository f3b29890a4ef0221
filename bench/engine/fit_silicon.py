"""Fits LinearStepTime to published end-to-end runs of servers, for models without kernel tables (70B in FP8, 671B).

``python -m bench.engine.fit_silicon`` rewrites their sets in ``coefficients/`` from ``MILLRACE_DATA``. One fit covers
all tensor-parallel groups of a server: what GPUs share falls with their number, all-reduces come on top. Runs are at
constant concurrency, up to 64 requests, so larger batches are extrapolated.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from millrace.enginemodel.step_time_models import LinearStepTime, Provenance
from millrace.profiling.fitting import non_negative
from millrace.profiling.writing import to_toml

from bench.engine.fit_published import COEFFICIENTS, data_folder
from bench.step_time_silicon import Run, read

ROUNDS = 15
SPLITS = 5
NS_PER_MS = 1e6


class Server(NamedTuple):
    """Runs that one fit covers.

    Attributes:
        stem: Of the sets' names; the number of GPUs is appended.
        model: Part of the model's name in the data.
        ways: GPUs of each group.
    """

    stem: str
    model: str
    system: str
    backend: str
    title: str
    hardware: str
    ways: tuple[int, ...]


SERVERS = (
    Server(
        "h100-llama-3.1-70b-fp8",
        "Llama-3.1-70B",
        "h100_sxm",
        "vllm",
        "Llama-3.1-70B, FP8",
        "NVIDIA H100 SXM",
        (2, 4, 8),
    ),
    Server(
        "h200-llama-3.1-70b-fp8",
        "Llama-3.1-70B",
        "h200_sxm",
        "vllm",
        "Llama-3.1-70B, FP8",
        "NVIDIA H200 SXM",
        (1, 2, 4, 8),
    ),
    Server(
        "h200-deepseek-671b-fp8", "DeepSeek", "h200_sxm", "sglang", "DeepSeek-V3 and R1, FP8", "NVIDIA H200 SXM", (8,)
    ),
)


class Fitted(NamedTuple):
    """A fit and its errors.

    Attributes:
        solution: ns of each term.
        errors: Mean absolute relative error of each held-out third, one per split.
        runs: All of them.
    """

    solution: tuple[float, ...]
    errors: tuple[float, ...]
    runs: int


def main() -> None:
    """Fits, prints, writes."""
    for server in SERVERS:
        found = fitted(server, data_folder())
        print(f"# {server.stem}: {found.runs} runs, held out {told(found.errors)}")
        for ways in server.ways:
            name = f"{server.stem}-tp{ways}"
            model, provenance = linear(found, ways), _provenance(server, found, ways)
            (COEFFICIENTS / f"{name}.toml").write_text(to_toml(model, provenance))


def runs_of(server: Server, data: Path) -> list[Run]:
    """Its published runs."""
    runs = read(data / "aiconfigurator_silicon_e2e" / "silicon_sample_h100_h200.csv")
    return [
        run
        for run in runs
        if server.model in run.model
        and (run.system, run.backend) == (server.system, server.backend)
        and run.ways in server.ways
    ]


def terms(run: Run) -> list[float]:
    """Return the terms that a request's end-to-end time is a sum of.

    Steps by GPUs and whole, decodes and prompt tokens by GPUs and with all-reduces, context, prompt work.
    """
    ways, several = run.ways, 1.0 if run.ways > 1 else 0.0
    decodes, prompts = run.output * run.batch, run.batch * run.prompt
    return [
        run.output / ways,
        run.output,
        decodes / ways,
        decodes * several,
        prompts / ways,
        prompts * several,
        decodes * run.context / ways,
        prompts * run.prompt / 2 / ways,
    ]


def fitted(server: Server, data: Path) -> Fitted:
    """The fit to all runs, and the errors of fits to two thirds on the rest."""
    runs = runs_of(server, data)
    rows, times = np.array([terms(run) for run in runs]), np.array([run.e2e * NS_PER_MS for run in runs])
    errors = []
    for seed in range(SPLITS):
        order = np.random.default_rng(seed).permutation(len(runs))
        out, rest = order[: len(runs) // 3], order[len(runs) // 3 :]
        solution = non_negative(rows[rest] / times[rest, None], rounds=ROUNDS)
        errors.append(float(np.mean(np.abs(rows[out] @ solution / times[out] - 1))))
    solution = non_negative(rows / times[:, None], rounds=ROUNDS)
    return Fitted(tuple(float(value) for value in solution), tuple(errors), len(runs))


def linear(found: Fitted, ways: int) -> LinearStepTime:
    """The step-time model of one group."""
    shared, fixed, decode, decode_reduce, prompt, prompt_reduce, context, work = found.solution
    several = 1.0 if ways > 1 else 0.0
    costs = (
        fixed + shared / ways,
        decode / ways + several * decode_reduce,
        prompt / ways + several * prompt_reduce,
        context / ways,
        work / ways,
        0.0,
    )
    return LinearStepTime.fitted([float(f"{value:.4g}") for value in costs])


def told(errors: tuple[float, ...]) -> str:
    """Mean and range of held-out errors."""
    return f"{np.mean(errors):.1%} ({min(errors):.1%} to {max(errors):.1%})"


def _provenance(server: Server, found: Fitted, ways: int) -> Provenance:
    return Provenance(
        model=server.title,
        hardware=server.hardware,
        source=(
            f"{found.runs} end-to-end runs of {server.backend} with {', '.join(map(str, server.ways))} GPUs, at most "
            "64 requests at once (aiconfigurator's silicon samples, ai-dynamo/aiconfigurator); one fit for all groups; "
            f"bench.engine.fit_silicon, TP{ways}"
        ),
        error=f"end-to-end time of held-out runs, {SPLITS} splits: mean absolute {told(found.errors)}",
    )


if __name__ == "__main__":
    main()
