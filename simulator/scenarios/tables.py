"""Results as printed tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.box import HORIZONTALS
from rich.console import Group
from rich.table import Table

from simulator.scenarios.running import ScenarioOutcome
from simulator.scenarios.spec import SloSpec
from simulator.scenarios.statistics import ForecastErrors, LatencySpread, Summary


def run_tables(outcome: ScenarioOutcome, summary: Summary) -> Group:
    """One run: latencies by percentile, then everything else."""
    table = Table(title=f"{summary.name}: {summary.policy}", title_justify="left")
    for column in ("", "mean", "p50", "p90", "p99", "max"):
        table.add_column(column, justify="left" if not column else "right")
    rows = [
        ("TTFT, s", summary.ttft_s, 1.0),
        ("TPOT, ms", summary.tpot_s, 1000.0),
        ("end to end, s", summary.e2e_s, 1.0),
    ]
    if summary.migrations:
        rows.append(("frozen, ms", summary.frozen_s, 1000.0))
    for name, values, scale in rows:
        table.add_row(name, *_cells(values, scale))
    facts = Table.grid(padding=(0, 2))
    for name, value in _facts(outcome, summary):
        facts.add_row(name, value)
    return Group(table, facts)


def sweep_table(summaries: Sequence[Summary]) -> Table:
    """Many runs, a row each."""
    title = "runs: rates in requests/s, TTFT and e2e in s, TPOT in ms"
    table = Table(title=title, title_justify="left", box=HORIZONTALS, padding=(0, 1, 0, 0), pad_edge=False)
    heads = "seed, rate, TTFT mean, TTFT p99, TPOT mean, e2e mean, e2e p99, goodput, preempt., lost"
    table.add_column("run", overflow="fold")
    for column in heads.split(", "):
        table.add_column(column.replace(" ", "\n"), justify="right", no_wrap=True)
    for s in summaries:
        table.add_row(
            s.name,
            str(s.seed),
            f"{s.rate_per_s:.1f}",
            f"{s.ttft_s.mean:.3f}",
            f"{s.ttft_s.p99:.3f}",
            f"{1000 * s.tpot_s.mean:.1f}",
            f"{s.e2e_s.mean:.2f}",
            f"{s.e2e_s.p99:.2f}",
            f"{s.goodput:.1%}",
            f"{s.preemptions:,}",
            str(s.lost),
        )
    return table


def _facts(outcome: ScenarioOutcome, summary: Summary) -> list[tuple[str, str]]:
    facts = [
        ("arrivals", f"{summary.rate_per_s:.2f}/s"),
        ("served", _served(outcome, summary)),
        ("throughput", f"{summary.requests_per_s:.2f}/s"),
        ("output tokens", f"{summary.tokens_per_s:,.0f}/s"),
        ("within SLO", f"{summary.goodput:.1%} ({_bounds(outcome.spec.slo)})"),
        ("preemptions", f"{summary.preemptions:,}"),
        ("imbalance", f"{summary.imbalance:.3f}"),
    ]
    if summary.prefix_share:
        error = f", predicted {summary.prefix_error:.1%} off" if summary.prefix_error is not None else ""
        facts.append(("prefix hits", f"{summary.prefix_share:.1%} of prompt tokens{error}"))
    if summary.continuations:
        facts.append(("continuations", str(summary.continuations)))
    if summary.migrations:
        facts.append(("migrations", ", ".join(f"{count:,} {how}" for how, count in summary.migrations.items())))
    for name, errors in (("TTFT error", summary.ttft_error), ("e2e error", summary.e2e_error)):
        if errors.count:
            facts.append((name, _error(errors)))
    if summary.fallbacks:
        facts.append(("fallbacks", str(summary.fallbacks)))
    facts += [(f"{name}", str(count)) for name, count in outcome.outcomes.items() if name != "completed"]
    return [
        *facts,
        ("seed, trace", f"{summary.seed}, {summary.trace_hash}"),
        ("simulated", f"{summary.virtual_s:,.0f} s in {summary.wall_s:.1f} s"),
        ("messages", f"{summary.messages:,}"),
    ]


def _served(outcome: ScenarioOutcome, summary: Summary) -> str:
    warm_up = outcome.spec.workload.warm_up
    parts = [f"{summary.served:,}"]
    parts += [f"lost {summary.lost:,}"] if summary.lost else []
    parts += [f"{warm_up:,} more of the warm-up left out of all figures"] if warm_up else []
    return ", ".join(parts)


def _bounds(slo: SloSpec) -> str:
    """The bounds that a request must keep, as `TTFT 3 s, TPOT 60 ms`."""
    bounds = (("TTFT", slo.ttft_ms / 1e3, "s"), ("TPOT", slo.tpot_ms, "ms"), ("end to end", slo.e2e_ms / 1e3, "s"))
    return ", ".join(f"{name} {bound:g} {unit}" for name, bound, unit in bounds if bound) or "completed"


def _error(errors: ForecastErrors) -> str:
    return f"{errors.absolute:.1%}, bias {errors.bias:+.1%}"


def _cells(values: LatencySpread, scale: float) -> list[str]:
    numbers = (values.mean, values.p50, values.p90, values.p99, values.largest)
    return ["-" if math.isnan(number) else f"{number * scale:.3f}" for number in numbers]
