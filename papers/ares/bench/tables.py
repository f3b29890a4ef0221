"""Tables of what rescheduling gives: tails, goodput, preemptions, variance of load, and what was moved for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from bench.scenarios.rows import Row
from bench.scenarios.tables import figure, table

Value = Callable[[Row], float | None]

COLUMNS: tuple[tuple[str, Value, int], ...] = (
    ("TPOT mean ms", lambda row: _scaled(row.tpot_mean, 1e3), 1),
    ("TPOT p99 ms", lambda row: _scaled(row.tpot_p99, 1e3), 1),
    ("e2e mean s", lambda row: row.e2e_mean, 1),
    ("e2e p99 s", lambda row: row.e2e_p99, 0),
    ("within SLO %", lambda row: _scaled(row.goodput, 100), 1),
    ("preempted", lambda row: row.preemptions, 1),
    ("load sd, tokens", lambda row: _sqrt(row.further.get("load_variance")), 0),
    ("moves", lambda row: row.further.get("moves"), 0),
    ("moved GB", lambda row: _scaled(row.further.get("moved_bytes"), 1e-9), 1),
)
#: What is compared with a baseline.
COMPARED: tuple[tuple[str, Value], ...] = (
    ("TPOT mean", lambda row: row.tpot_mean),
    ("TPOT p99", lambda row: row.tpot_p99),
    ("e2e mean", lambda row: row.e2e_mean),
    ("e2e p99", lambda row: row.e2e_p99),
    ("within SLO", lambda row: row.goodput),
    ("load variance", lambda row: row.further.get("load_variance")),
)


def rows_table(rows: Sequence[Row]) -> str:
    """A line per rate and label, each a mean over its rows, which are seeds."""
    lines = []
    for rate, label in dict.fromkeys((row.rate, row.label) for row in rows):
        own = [row for row in rows if (row.rate, row.label) == (rate, label)]
        lines.append([f"{rate:g}/s, {label}", *(_cell(own, value, places) for _, value, places in COLUMNS)])
    return table(["", *(head for head, _, _ in COLUMNS)], lines)


def against(rows: Sequence[Row], baseline: str) -> str:
    """By how many percent each label differs from another at the same rate, paired by seed."""
    theirs = {(row.rate, row.seed): row for row in rows if row.label == baseline}
    lines = []
    for rate, label in dict.fromkeys((row.rate, row.label) for row in rows if row.label != baseline):
        own = [row for row in rows if (row.rate, row.label) == (rate, label) and (rate, row.seed) in theirs]
        pairs = [(row, theirs[rate, row.seed]) for row in own]
        if pairs:
            lines.append([f"{rate:g}/s, {label}", *(figure(_changes(pairs, value), places=1) for _, value in COMPARED)])
    return table([f"% against {baseline}", *(head for head, _ in COMPARED)], lines)


def _changes(pairs: Sequence[tuple[Row, Row]], value: Value) -> list[float]:
    known = [(value(own), value(other)) for own, other in pairs]
    return [100 * (own / other - 1) for own, other in known if own is not None and other]


def _cell(rows: Sequence[Row], value: Value, places: int) -> str:
    return figure([known for row in rows if (known := value(row)) is not None], places=places)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else factor * value


def _sqrt(value: float | None) -> float | None:
    return None if value is None else math.sqrt(value)
