"""Comparison of two policies on the same requests: the faster one in each world, and whether the worlds agree.

Every policy gets the same requests, so two policies are compared on those that both served: the length of a request,
which most of its time comes from, drops out of the difference. Intervals are of the difference, by a bootstrap that
draws whole slices of two seconds, because requests of one burst wait for each other. A pair whose interval holds 0 in a
world is not told apart there; an order counts only between pairs that are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import combinations

import msgspec
import numpy as np
import numpy.typing as npt

from bench.live.recording import Figures, Recording
from bench.live.statistics import FIGURES, RESAMPLES, SHARE

#: A request in all runs of its round: round, number in the plan.
Key = tuple[int, int]

#: Requests that arrive within one of these are drawn together, s.
SLICE_S = 2.0

#: What an order is asked about, by name of figure and part.
PARTS = ("mean", "p99")


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """First policy minus second, s: the value, and the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def sign(self) -> int:
        """-1 where the first is sooner, 1 where the second is, 0 where they are not told apart."""
        return (self.low > 0) - (self.high < 0)


class Verdict(StrEnum):
    """Verdict of the two worlds on one pair."""

    SAME = "the same order"
    OPPOSITE = "OPPOSITE ORDERS"
    NEITHER = "not told apart in either"
    LIVE_ONLY = "not told apart in simulation"
    SIMULATED_ONLY = "not told apart live"


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Two policies by one figure. ``count``: requests that both served in both worlds."""

    first: str
    second: str
    count: int
    live: Difference
    simulated: Difference

    @property
    def verdict(self) -> Verdict:
        """Whether the two worlds agree."""
        live, simulated = self.live.sign, self.simulated.sign
        if live and simulated:
            return Verdict.SAME if live == simulated else Verdict.OPPOSITE
        if live:
            return Verdict.LIVE_ONLY
        return Verdict.SIMULATED_ONLY if simulated else Verdict.NEITHER


def keyed(recording: Recording, done: Sequence[Figures], *, simulated: bool) -> dict[Key, Figures]:
    """A run's requests by their place in the plan, which no policy changes.

    Args:
        done: Of this run, or of its replay, whose requests are numbered in order of their recorded arrival.
    """
    numbers = {played.request: played.number for played in recording.played if played.request}
    if simulated:
        arrived = sorted(recording.outcomes, key=lambda outcome: outcome.arrival_ns)
        numbers = {str(at): numbers[o.request] for at, o in enumerate(arrived) if o.request in numbers}
    return {(recording.round, numbers[f.request]): f for f in done if f.request in numbers}


def differences(
    one: Mapping[Key, Figures], other: Mapping[Key, Figures], keys: Sequence[Key], name: str
) -> dict[str, Difference]:
    """Of two policies, by part; a request's slice is told by its arrival in ``one``."""
    of = FIGURES[name]
    values = np.array([(of(one[key]), of(other[key])) for key in keys], dtype=np.float64).reshape(-1, 2)
    slices = [(key[0], int(one[key].arrival_s // SLICE_S)) for key in keys]
    known: npt.NDArray[np.bool_] = np.logical_not(np.isnan(values).any(axis=1))
    drawn = _drawn([each for each, is_known in zip(slices, known, strict=True) if is_known])
    values = values[known]
    return {part: _difference(part, values, drawn) for part in PARTS}


def _drawn(slices: Sequence[tuple[int, int]]) -> list[npt.NDArray[np.intp]]:
    """Rows of each resample: as many whole slices as there are, each drawn any number of times."""
    rows: dict[tuple[int, int], list[int]] = {}
    for row, at in enumerate(slices):
        rows.setdefault(at, []).append(row)
    groups = [np.array(members, dtype=np.intp) for members in rows.values()]
    rng = np.random.default_rng(0)
    return [
        np.concatenate([groups[index] for index in rng.integers(len(groups), size=len(groups))])
        for _ in range(RESAMPLES if groups else 0)
    ]


def _difference(part: str, values: npt.NDArray[np.float64], drawn: Sequence[npt.NDArray[np.intp]]) -> Difference:
    if not drawn:
        return Difference(value=float("nan"), low=float("nan"), high=float("nan"))
    several = [_of_part(part, values[rows]) for rows in drawn]
    low, high = np.percentile(several, (50 * (1 - SHARE), 50 * (1 + SHARE)))
    return Difference(value=_of_part(part, values), low=float(low), high=float(high))


def _of_part(part: str, values: npt.NDArray[np.float64]) -> float:
    told = values.mean(axis=0) if part == "mean" else np.percentile(values, 99, axis=0)
    return float(told[0] - told[1])


def pairs(
    live: Mapping[str, Mapping[Key, Figures]], simulated: Mapping[str, Mapping[Key, Figures]], name: str
) -> dict[str, list[Pair]]:
    """Every two policies, by part of a figure."""
    found: dict[str, list[Pair]] = {part: [] for part in PARTS}
    for first, second in combinations(sorted(live), 2):
        worlds = (live[first], live[second], simulated[first], simulated[second])
        keys = sorted(set.intersection(*(set(world) for world in worlds)))
        real = differences(live[first], live[second], keys, name)
        modelled = differences(simulated[first], simulated[second], keys, name)
        for part in PARTS:
            found[part].append(
                Pair(first=first, second=second, count=len(keys), live=real[part], simulated=modelled[part])
            )
    return found


def pair_lines(name: str, part: str, told: Sequence[Pair]) -> list[str]:
    """As text: what agrees, and each pair."""
    count = {verdict: sum(pair.verdict == verdict for pair in told) for verdict in Verdict}
    summary = ", ".join(f"{many} {verdict}" for verdict, many in count.items() if many)
    return [f"  {name} {part}: of {len(told)} pairs {summary}", *(_line(pair) for pair in told)]


def _line(pair: Pair) -> str:
    names = f"{pair.first} - {pair.second}"
    return (
        f"    {names:<46} live {cell(pair.live)}  simulated {cell(pair.simulated)}  "
        f"{pair.verdict}{_first(pair)} (n {pair.count})"
    )


def cell(told: Difference) -> str:
    """In ms, with the interval."""
    return f"{told.value * 1000:>+9.1f} [{told.low * 1000:>+8.1f}, {told.high * 1000:>+8.1f}]"


def _first(pair: Pair) -> str:
    """Name the faster policy, where both worlds agree on it; empty elsewhere."""
    if pair.verdict != Verdict.SAME:
        return ""
    return f": {pair.first if pair.live.sign < 0 else pair.second} first"
