"""Capacity: the highest load at which most requests keep the SLO, by halving, in one stage and with planned stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from bench.scenarios.tables import figure, table
from papers.cascadeinfer.bench.stages.runs import RunOptions, run_all
from papers.cascadeinfer.bench.stages.setups import Setup, merged, told
from papers.cascadeinfer.bench.stages.variants import BASE, BASELINES, Layer, hand_over

#: Share of the requests that keep the SLO at capacity.
SHARE = 0.9

#: Loads between which capacity lies, shares of the fluid bound, and halvings of that range.
LOWEST, HIGHEST, HALVINGS = 0.3, 1.1, 5

#: Whether a load kept the SLO; None where it was not run.
Trial = Callable[[float], bool | None]


class Bracket(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a search: the highest load that kept the SLO, and the lowest that did not; None where none was run.

    Attributes:
        ended: All halvings were made.
    """

    kept: float | None
    lost: float | None
    ended: bool

    @property
    def load(self) -> float | None:
        """The capacity; None where it is not bracketed."""
        return self.kept if self.ended and self.kept is not None and self.lost is not None else None

    def told(self) -> str:
        """The capacity, or what is known of it."""
        if self.load is not None:
            return f"{self.load:.3f}"
        if self.kept is None and self.lost is None:
            return "not bracketed: no run"
        if self.kept is None:
            return f"not bracketed: below {self.lost:.3f}"
        if self.lost is None:
            return f"not bracketed: {self.kept:.3f} or more"
        return f"not bracketed: {self.kept:.3f} to {self.lost:.3f}"


def search(trial: Trial, *, low: float = LOWEST, high: float = HIGHEST, halvings: int = HALVINGS) -> Bracket:
    """Halves the range between two loads; stops where a load cannot be run."""
    kept: float | None = None
    lost: float | None = None
    for _ in range(halvings):
        load = (low + high) / 2
        keeps = trial(load)
        if keeps is None:
            return Bracket(kept=kept, lost=lost, ended=False)
        if keeps:
            low = kept = load
        else:
            high = lost = load
    return Bracket(kept=kept, lost=lost, ended=True)


def capacity_table(setup: Setup, chosen: RunOptions) -> str:
    """A line per way to serve, seeds paired; the planned layout is that of each load."""
    ways: dict[str, Callable[[Setup], Layer]] = {
        BASE: lambda _: BASELINES[BASE],
        "exact, hand-over": _planned,
    }
    found = {
        label: [search(_trial(setup, label, way, chosen, seed)) for seed in range(chosen.seeds)]
        for label, way in ways.items()
    }
    lines = [_line(setup, label, brackets, found[BASE]) for label, brackets in found.items()]
    return table(["", "share of the bound", "requests/s", f"% of {BASE}", "layout there"], lines)


def _line(setup: Setup, label: str, brackets: Sequence[Bracket], base: Sequence[Bracket]) -> list[str]:
    """Means over the seeds that are bracketed; what is known of each where none is."""
    loads = [bracket.load for bracket in brackets if bracket.load is not None]
    if not loads:
        return [label, "; ".join(bracket.told() for bracket in brackets), "", "", ""]
    share = figure(loads, places=3)
    if len(loads) < len(brackets):
        share += f" ({len(loads)} of {len(brackets)} seeds)"
    rates = [load / setup.load * setup.rate_per_s() for load in loads]
    pairs = [(a.load, b.load) for a, b in zip(brackets, base, strict=True)]
    gains = [100 * (a / b - 1) for a, b in pairs if a is not None and b is not None]
    shapes = told(_at(setup, sum(loads) / len(loads)).planned("exact")) if label != BASE else ""
    gain = "" if label == BASE or not gains else figure(gains, places=1)
    return [label, share, figure(rates, places=1), gain, shapes]


def _trial(setup: Setup, label: str, way: Callable[[Setup], Layer], chosen: RunOptions, seed: int) -> Trial:
    def keeps(load: float) -> bool | None:
        at = _at(setup, load)
        jobs = chosen.jobs({f"{label} at {load:.3f}": at.spec(way(at))})
        rows = run_all([job for job in jobs if job.spec.seed == seed], chosen)
        return rows[0].good >= SHARE if rows else None

    return keeps


def _planned(setup: Setup) -> Layer:
    shapes = setup.planned("exact")
    return merged(hand_over(shapes), setup.begun(shapes)) if len(shapes) > 1 else BASELINES[BASE]


def _at(setup: Setup, load: float) -> Setup:
    return msgspec.structs.replace(setup, load=load)
