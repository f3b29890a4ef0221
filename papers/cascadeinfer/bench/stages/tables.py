"""Rows as text: means with intervals over seeds, and differences paired by seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.scenarios.tables import figure, table
from papers.cascadeinfer.bench.stages.runs import StageRow

Column = tuple[str, Callable[[StageRow], float], int]

COLUMNS: tuple[Column, ...] = (
    ("ms/token", lambda row: 1e3 * row.norm, 2),
    ("TTFT ms", lambda row: 1e3 * row.ttft, 0),
    ("p99", lambda row: 1e3 * row.ttft_p99, 0),
    ("TPOT ms", lambda row: 1e3 * row.tpot, 2),
    ("p99", lambda row: 1e3 * row.tpot_p99, 1),
    ("e2e s", lambda row: row.e2e, 2),
    ("SLO %", lambda row: 100 * row.good, 1),
    ("moves", lambda row: row.moved, 0),
)


def comparison(rows: Sequence[StageRow], baseline: str, columns: Sequence[Column] = COLUMNS) -> str:
    """A line per label; the last column is normalised latency against the baseline, paired by seed."""
    labels = list(dict.fromkeys(row.label for row in rows))
    lines = []
    for label in labels:
        own = [row for row in rows if row.label == label]
        cells = [figure([value(row) for row in own], places=places) for _, value, places in columns]
        lines.append([label, *cells, against(rows, label, baseline)])
    return table(["", *(head for head, _, _ in columns), f"% of {baseline}"], lines)


def against(
    rows: Sequence[StageRow], label: str, baseline: str, value: Callable[[StageRow], float] = lambda row: row.norm
) -> str:
    """By how many percent one label differs from another, paired by seed."""
    pairs = paired(rows, label, baseline, value)
    return "" if label == baseline or not pairs else figure([100 * (a / b - 1) for a, b in pairs], places=1)


def paired(
    rows: Sequence[StageRow], label: str, baseline: str, value: Callable[[StageRow], float] = lambda row: row.norm
) -> list[tuple[float, float]]:
    """Figures of both labels for each seed that has both."""
    theirs = {row.seed: row for row in rows if row.label == baseline}
    return [(value(row), value(theirs[row.seed])) for row in rows if row.label == label and row.seed in theirs]
