"""Capacity: the highest load at which most requests keep the SLO, by halving, in one stage and with planned stages."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from bench.block.tables import figure, table
from bench.stages.runs import RunOptions, run_all
from bench.stages.setups import Setup, told
from bench.stages.variants import BASE, BASELINES, Layer, hand_over

#: Share of the requests that keep the SLO at capacity.
SHARE = 0.9

#: Loads between which capacity lies, shares of the fluid bound, and halvings of that range.
LOWEST, HIGHEST, HALVINGS = 0.3, 1.1, 5


def capacity_table(setup: Setup, chosen: RunOptions) -> str:
    """A line per way to serve, seeds paired; the planned layout is that of each load."""
    ways: dict[str, Callable[[Setup], Layer]] = {
        BASE: lambda _: BASELINES[BASE],
        "exact, hand-over": _planned,
    }
    found = {
        label: [_capacity(setup, label, way, chosen, seed) for seed in range(chosen.seeds)]
        for label, way in ways.items()
    }
    base = found[BASE]
    lines = []
    for label, loads in found.items():
        rates = [load / setup.load * setup.rate_per_s() for load in loads]
        gain = "" if label == BASE else figure([100 * (a / b - 1) for a, b in zip(loads, base, strict=True)], places=1)
        shapes = told(_at(setup, sum(loads) / len(loads)).planned("exact")) if label != BASE else ""
        lines.append([label, figure(loads, places=3), figure(rates, places=1), gain, shapes])
    return table(["", "share of the bound", "requests/s", f"% of {BASE}", "layout there"], lines)


def _capacity(setup: Setup, label: str, way: Callable[[Setup], Layer], chosen: RunOptions, seed: int) -> float:
    """Load found by halving; LOWEST where even that is too much."""
    low, high = LOWEST, HIGHEST
    for _ in range(HALVINGS):
        load = (low + high) / 2
        at = _at(setup, load)
        job = [job for job in chosen.jobs({f"{label} at {load:.3f}": at.spec(way(at))}) if job.spec.seed == seed]
        rows = run_all(job, chosen)
        if not rows:
            return low
        low, high = (load, high) if rows[0].good >= SHARE else (low, load)
    return low


def _planned(setup: Setup) -> Layer:
    shapes = setup.planned("exact")
    return hand_over(shapes) if len(shapes) > 1 else BASELINES[BASE]


def _at(setup: Setup, load: float) -> Setup:
    return msgspec.structs.replace(setup, load=load)
