"""The highest rates that policies hold, searched with many runs."""

from __future__ import annotations

from typing import Any

import msgspec

from bench.scenarios.rows import Row
from bench.scenarios.runs import Job, Options, run_all
from simulator.scenarios.reading import ScenarioError
from simulator.scenarios.spec import ScenarioSpec


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """The highest rate that held for each seed, requests per second; the lowest that did not is ``tolerance`` above."""

    label: str
    rates: list[float]


def capacities(
    specs: dict[str, ScenarioSpec], chosen: Options, *, bound_s: float, low: float, high: float, tolerance: float
) -> tuple[list[Capacity], list[Row]]:
    """Bisects all labels and seeds at once, a round of runs at a time.

    Args:
        bound_s: TTFT P99 must be below it, seconds.
        low, high: Rates of the first two looks; a capacity outside is told as the nearer one.

    Returns:
        The capacities, and all rows that were made for them.
    """
    brackets = {(label, seed): (low, high) for label in specs for seed in range(chosen.seeds)}
    rows: list[Row] = []
    middle = dict.fromkeys(brackets, low)
    while middle:
        jobs = [_job(specs[label], label, seed, rate) for (label, seed), rate in middle.items()]
        made = run_all(jobs, chosen)
        rows += made
        for (place, rate), row in zip(middle.items(), made, strict=True):
            below, above = brackets[place]
            held = row.ttft_p99 < bound_s and not row.lost
            brackets[place] = (rate, above) if held else (below, rate if rate > low else low)
        middle = {p: (a + b) / 2 for p, (a, b) in brackets.items() if b - a > tolerance}
    found = [Capacity(label=label, rates=[brackets[label, s][0] for s in range(chosen.seeds)]) for label in specs]
    return found, rows


def _job(spec: ScenarioSpec, label: str, seed: int, rate: float) -> Job:
    seeded = msgspec.structs.replace(at_rate(spec, rate), seed=seed)
    return Job(label=label, rate=rate, spec=seeded)


def at_rate(spec: ScenarioSpec, rate_per_s: float) -> ScenarioSpec:
    """The scenario with this arrival rate.

    Raises:
        ScenarioError: its arrivals are those of a trace, which has no rate (its ``speed`` may be swept).
    """
    arrivals: Any = spec.workload.arrivals
    if not hasattr(arrivals, "rate_per_s"):
        raise ScenarioError("workload.arrivals: the times of a trace have no rate to search; sweep their speed")
    changed = msgspec.structs.replace(arrivals, rate_per_s=rate_per_s)
    return msgspec.structs.replace(spec, workload=msgspec.structs.replace(spec.workload, arrivals=changed))
