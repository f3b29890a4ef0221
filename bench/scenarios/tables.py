"""Means with their 95 % t-intervals over seeds, as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from bench.scenarios.rows import Row


def confidence(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half width of its 95 % interval; the half width is nan for fewer than two values."""
    from scipy.stats import t as student  # scipy takes a while to import

    count = len(values)
    mean = sum(values) / count if count else math.nan
    if count < 2:
        return mean, math.nan
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
    return mean, float(student.ppf(0.975, count - 1)) * deviation / math.sqrt(count)


def figure(values: Sequence[float], *, places: int = 2) -> str:
    """``12.30 ±0.45``, or the value alone where there is no interval."""
    mean, half = confidence(values)
    if math.isnan(mean):
        return "-"
    return f"{mean:,.{places}f}" + ("" if math.isnan(half) else f" ±{half:,.{places}f}")


def table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Columns of text, the first one to the left, the others to the right."""
    widths = [max(len(row[column]) for row in (heads, *lines)) for column in range(len(heads))]

    def line(cells: Sequence[str]) -> str:
        rest = (f"{cell:>{width}}" for cell, width in zip(cells[1:], widths[1:], strict=True))
        return "  ".join((f"{cells[0]:<{widths[0]}}", *rest)).rstrip()

    return "\n".join(line(row) for row in (heads, *lines))


#: Columns of the tables of latencies: head, value, decimals.
LATENCIES: tuple[tuple[str, Callable[[Row], float], int], ...] = (
    ("TTFT mean s", lambda row: row.ttft_mean, 2),
    ("TTFT p99 s", lambda row: row.ttft_p99, 2),
    ("e2e mean s", lambda row: row.e2e_mean, 2),
    ("e2e p99 s", lambda row: row.e2e_p99, 1),
    ("req/s", lambda row: row.throughput, 2),
    ("preempted", lambda row: row.preemptions, 0),
)


def latency_table(labels: Sequence[str], rows: Sequence[Row]) -> str:
    """A line per label, each a mean over its rows, which are seeds; forecast error where there are forecasts."""
    lines = []
    for label in labels:
        own = [row for row in rows if row.label == label]
        errors = [100 * row.e2e_error for row in own if row.e2e_error is not None]
        cells = [figure([value(row) for row in own], places=places) for _, value, places in LATENCIES]
        lines.append([label, *cells, figure(errors, places=1)])
    return table(["", *(head for head, _, _ in LATENCIES), "e2e error %"], lines)


#: What is compared by ``gains``, in the order of its columns.
GAINS = ("ttft_mean", "ttft_p99", "e2e_mean", "e2e_p99", "throughput")
GAIN_HEADS = ("TTFT mean", "TTFT p99", "e2e mean", "e2e p99", "req/s")


def gains(rows: Sequence[Row], label: str, baseline: str) -> list[str]:
    """By how many percent one label's figures differ from another's, paired by seed; empty where no seed has both."""
    theirs = {row.seed: row for row in rows if row.label == baseline}
    pairs = [(row, theirs[row.seed]) for row in rows if row.label == label and row.seed in theirs]
    if not pairs:
        return []
    return [figure([100 * (getattr(a, value) / getattr(b, value) - 1) for a, b in pairs], places=1) for value in GAINS]


def gains_table(rows: Sequence[Row], labels: Sequence[str], baseline: str) -> str:
    """A line per label that shares seeds with the baseline."""
    lines = [[label, *cells] for label in labels if label != baseline and (cells := gains(rows, label, baseline))]
    return table([f"% against {baseline}", *GAIN_HEADS], lines)
