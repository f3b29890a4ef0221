"""Cost of unequal lengths in one decode batch, from the one public measurement of it, and the form that fits best.

CascadeInfer's figure has a penalty of 1.1 to 2.1 for unequal lengths; this measurement has 1.0 to 1.5. Forms are fitted
on two thirds of the batches, and judged on the rest. Gated forms cost nothing for smaller batches than those
from which FlashAttention-2 no longer splits a sequence over multiprocessors.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from bench.published.surface import Surface
from bench.published.tables_servingsim import Skew, attention, skews
from papers.cascadeinfer.unequal import not_split_from

SEED = 0
PENALISED = 1.1  # batches that take a tenth longer than equal ones are looked at on their own
KV_HEADS = 8  # Llama-3.1-8B
Form = Callable[[float], np.ndarray]
Floats = np.ndarray


class Gpu(msgspec.Struct, frozen=True):
    """A GPU that was measured."""

    name: str
    multiprocessors: int

    @property
    def per_head(self) -> float:
        """Multiprocessors per KV head."""
        return self.multiprocessors / KV_HEADS


GPUS = (Gpu("RTX4090", 128), Gpu("RTXPRO6000", 188))


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """A form's parameter and its relative errors on held-out batches."""

    parameter: float
    errors: np.ndarray
    hard: np.ndarray

    def row(self, name: str) -> str:
        """Of the table."""
        absolute = np.abs(self.errors)
        return (
            f"{name:<44}{self.parameter:9.3f}{absolute.mean():8.1%}{np.quantile(absolute, 0.9):8.1%}"
            f"{self.errors.mean():+8.1%}{np.abs(self.hard).mean():28.1%}"
        )


class Batches(msgspec.Struct, frozen=True, kw_only=True):
    """The measured batches as columns, and those that are held out."""

    even: Floats
    measured: Floats
    longest: Floats
    count: Floats
    mean: Floats
    deviation: Floats
    out: Floats

    @property
    def penalty(self) -> Floats:
        """Times of equal lengths."""
        return np.asarray(self.measured / self.even)

    def judged(self, predict: Form, values: Floats) -> Judged:
        """Fits a form by least mean absolute error, and judges it."""
        tried = [np.abs(predict(k)[~self.out] / self.measured[~self.out] - 1).mean() for k in values]
        k = float(values[int(np.argmin(tried))])
        error = predict(k) / self.measured - 1
        return Judged(parameter=k, errors=error[self.out], hard=error[self.out & (self.penalty > PENALISED)])


def report(data: Path) -> None:
    """Both GPUs."""
    for gpu in GPUS:
        stem = f"{gpu.name}_Llama-3.1-8B_tp1_"
        found = skews(data / "llmservingsim_rtx" / f"{stem}skew.csv")
        decode, _ = attention(data / "llmservingsim_rtx" / f"{stem}attention.csv")
        _report(gpu, found, decode)


def _report(gpu: Gpu, found: list[Skew], decode: Surface) -> None:
    batches = columns(found)
    penalty = batches.penalty
    print(
        f"{gpu.name}, decode attention, {len(found)} batches of 2 to 256: unequal lengths take "
        f"{np.median(penalty):.3f} (p50), {np.quantile(penalty, 0.9):.3f} (p90), {penalty.max():.3f} (most) times as "
        "long as equal ones"
    )
    print(f"{'form':<44}{'k':>9}{'MAPE':>8}{'p90':>8}{'bias':>8}{'MAPE where penalty > 10 %':>28}")
    for name, (predict, values) in forms(batches, gpu).items():
        print(batches.judged(predict, values).row(name))
    _contradiction(found, decode)
    print()


def _contradiction(found: list[Skew], decode: Surface) -> None:
    """Says how the two files of one profile differ: equal lengths at measured points of the attention table."""
    known = set(zip(decode.rows, decode.profiles, strict=True))
    sizes = {row: set(profile.sizes) for row, profile in known}
    both = [
        batch.even_ns / decode.at(batch.sequences, batch.context_tokens / batch.sequences)
        for batch in found
        if batch.sequences in sizes
        and min(sizes[batch.sequences]) <= batch.context_tokens / batch.sequences <= max(sizes[batch.sequences])
    ]
    low, middle, high = np.quantile(both, (0.1, 0.5, 0.9))
    print(
        f"equal lengths take {middle:.2f} times as long here as in the same GPU's attention table "
        f"({low:.2f} to {high:.2f} between p10 and p90, {len(both)} batches): ratios hold, ns do not"
    )


def columns(found: list[Skew]) -> Batches:
    """The batches, a third of them held out."""
    count = np.array([batch.sequences for batch in found])
    mean = np.array([batch.context_tokens for batch in found]) / count
    return Batches(
        even=np.array([batch.even_ns for batch in found]),
        measured=np.array([batch.ns for batch in found]),
        longest=np.array([batch.longest for batch in found]),
        count=count,
        mean=mean,
        deviation=np.array([_deviation(batch) for batch in found]) / mean,
        out=np.random.default_rng(SEED).random(len(found)) < 1 / 3,
    )


def forms(batches: Batches, gpu: Gpu) -> dict[str, tuple[Form, Floats]]:
    """Ways to say it, each with one parameter k, and the values to try."""
    even, longest, mean = batches.even, batches.longest, batches.mean
    gate = batches.count >= not_split_from(gpu.per_head)
    ratio = longest * gpu.per_head / (mean * batches.count)
    per_token = np.linspace(0, 60, 601)
    return {
        "equal lengths (no penalty)": (lambda k: even, np.zeros(1)),
        "max(equal, k ns · longest)": (lambda k: np.maximum(even, k * longest), per_token),
        "equal + k ns · (longest - mean)": (lambda k: even + k * (longest - mean), per_token),
        "equal · (1 + k · cv of lengths)": (lambda k: even * (1 + k * batches.deviation), np.linspace(0, 0.3, 301)),
        "gated: equal + k ns · (longest - mean)": (lambda k: even + gate * k * (longest - mean), per_token),
        "gated: equal · (1 + kappa · r · (1 - mean/longest))": (
            lambda k: even * (1 + gate * k * ratio * (1 - mean / longest)),
            np.linspace(0, 0.6, 601),
        ),
    }


def _deviation(batch: Skew) -> float:
    """Standard deviation of lengths."""
    mean = batch.context_tokens / batch.sequences
    short = batch.sequences - batch.long
    squares = batch.long * (batch.longest - mean) ** 2 + short * (batch.shortest - mean) ** 2
    return float((squares / batch.sequences) ** 0.5)
