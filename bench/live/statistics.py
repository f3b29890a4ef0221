"""Means and percentiles with intervals, errors of predictions, and orders of policies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from bench.live.recording import Figures

#: Resamples of an interval, and the share that it holds.
RESAMPLES, SHARE = 400, 0.95

#: What is compared, by name.
FIGURES: dict[str, Callable[[Figures], float]] = {
    "TTFT": lambda figure: figure.ttft_s,
    "TPOT": lambda figure: figure.tpot_s,
    "e2e": lambda figure: figure.e2e_s,
}


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Mean and P99 in s with the half widths of their 95 % intervals (bootstrap over requests, seed 0)."""

    mean: float
    mean_half: float
    p99: float
    p99_half: float


class Errors(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted against measured, both counted from the placement.

    Attributes:
        mean, median: Of |predicted - measured| / measured.
        sums: Sum of the predictions over the sum of the measured times.
        absolute_sums: Sum of |predicted - measured| over the sum of the measured times.
    """

    count: int
    mean: float
    median: float
    sums: float
    absolute_sums: float


def spread(values: Iterable[float]) -> Spread:
    """Of those that are numbers."""
    known = np.array([value for value in values if not math.isnan(value)])
    if not known.size:
        return Spread(mean=math.nan, mean_half=math.nan, p99=math.nan, p99_half=math.nan)
    drawn = np.random.default_rng(0).choice(known, size=(RESAMPLES, known.size))
    return Spread(
        mean=float(known.mean()),
        mean_half=_half(drawn.mean(axis=1)),
        p99=float(np.percentile(known, 99)),
        p99_half=_half(np.percentile(drawn, 99, axis=1)),
    )


def _half(values: npt.NDArray[np.float64]) -> float:
    low, high = np.percentile(values, (50 * (1 - SHARE), 50 * (1 + SHARE)))
    return float(high - low) / 2


def errors(pairs: Iterable[tuple[float, float]]) -> Errors:
    """Of (predicted, measured), where both are known."""
    known = np.array([(p, m) for p, m in pairs if not math.isnan(p + m) and m > 0])
    if not known.size:
        return Errors(count=0, mean=math.nan, median=math.nan, sums=math.nan, absolute_sums=math.nan)
    predicted, measured = known[:, 0], known[:, 1]
    relative = np.abs(predicted - measured) / measured
    return Errors(
        count=len(known),
        mean=float(relative.mean()),
        median=float(np.median(relative)),
        sums=float(predicted.sum() / measured.sum()),
        absolute_sums=float(np.abs(predicted - measured).sum() / measured.sum()),
    )


def e2e_errors(figures: Sequence[Figures]) -> Errors:
    """Of the end-to-end time."""
    return errors((figure.predicted_e2e_s, figure.e2e_s - figure.placing_s) for figure in figures)


def ttft_errors(figures: Sequence[Figures]) -> Errors:
    """Of the time to the first token."""
    return errors((figure.predicted_ttft_s, figure.ttft_s - figure.placing_s) for figure in figures)


def length_errors(figures: Sequence[Figures]) -> Errors:
    """Of the output's length."""
    return errors((figure.predicted_tokens, float(figure.output_tokens)) for figure in figures)


def ordered(values: dict[str, float]) -> list[str]:
    """Names from the least value on."""
    return sorted(values, key=lambda name: (values[name], name))
