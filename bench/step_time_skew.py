"""What unequal lengths in one decode batch cost, in the one public measurement of it, and which form says it best.

CascadeInfer's figure has a penalty of 1.1 to 2.1 for unequal lengths; this measurement has 1.0 to 1.5. Forms are fitted
on two thirds of the batches, and judged on the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from millrace.profiling.tables_servingsim import Skew, skews

SEED = 0
PENALISED = 1.1  # batches that take a tenth longer than equal ones are looked at on their own
Form = Callable[[float], np.ndarray]


def report(data: Path) -> None:
    """Both GPUs."""
    for name in ("RTX4090", "RTXPRO6000"):
        batches = skews(data / "llmservingsim_rtx" / f"{name}_Llama-3.1-8B_tp1_skew.csv")
        _report(name, batches)


def _report(name: str, batches: list[Skew]) -> None:
    measured = np.array([batch.ns for batch in batches])
    penalty = measured / np.array([batch.even_ns for batch in batches])
    print(
        f"{name}, decode attention, {len(batches)} batches of 2 to 256: unequal lengths take "
        f"{np.median(penalty):.3f} (p50), {np.quantile(penalty, 0.9):.3f} (p90), {penalty.max():.3f} (most) times as "
        "long as equal ones"
    )
    print(f"{'form':<40}{'k':>9}{'MAPE':>8}{'p90':>8}{'bias':>8}{'MAPE where penalty > 10 %':>28}")
    out = np.random.default_rng(SEED).random(len(batches)) < 1 / 3
    for form, (predict, values) in forms(batches).items():
        errors = [np.abs(predict(k)[~out] / measured[~out] - 1).mean() for k in values]
        k = float(values[int(np.argmin(errors))])
        error = predict(k)[out] / measured[out] - 1
        hard = error[penalty[out] > PENALISED]
        print(
            f"{form:<40}{k:9.3f}{np.abs(error).mean():8.1%}{np.quantile(np.abs(error), 0.9):8.1%}{error.mean():+8.1%}"
            f"{np.abs(hard).mean():28.1%}"
        )
    print()


def forms(batches: list[Skew]) -> dict[str, tuple[Form, np.ndarray]]:
    """Ways to say it, each with one parameter k, and the values to try."""
    even = np.array([batch.even_ns for batch in batches])
    longest = np.array([batch.longest for batch in batches])
    count = np.array([batch.sequences for batch in batches])
    mean = np.array([batch.context_tokens for batch in batches]) / count
    deviation = np.array([_deviation(batch) for batch in batches]) / mean
    per_token = np.linspace(0, 60, 601)
    return {
        "equal lengths (no penalty)": (lambda k: even, np.zeros(1)),
        "max(equal, k ns · longest)": (lambda k: np.maximum(even, k * longest), per_token),
        "equal + k ns · (longest - mean)": (lambda k: even + k * (longest - mean), per_token),
        "equal · (1 + k · cv of lengths)": (lambda k: even * (1 + k * deviation), np.linspace(0, 0.3, 301)),
    }


def _deviation(batch: Skew) -> float:
    """Standard deviation of lengths."""
    mean = batch.context_tokens / batch.sequences
    short = batch.sequences - batch.long
    squares = batch.long * (batch.longest - mean) ** 2 + short * (batch.shortest - mean) ** 2
    return float((squares / batch.sequences) ** 0.5)
