"""The highest arrival rate at which a scenario keeps its SLO: a bisection per seed, and a confidence interval over
seeds.

Each seed is searched by itself, with its own arrivals at every rate, so that seeds are independent samples of the
capacity; their mean has a t-interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from simulator.scenarios.reading import ScenarioError
from simulator.scenarios.spec import ScenarioSpec
from simulator.scenarios.statistics import LatencySpread, Summary, summarise
from simulator.scenarios.sweeping import RunInputs, Variant

#: Widening the bracket gives up after so many doublings.
DOUBLINGS_MAX = 12

_LATENCIES = ("ttft", "tpot", "e2e")
_FIGURES = ("mean", "p50", "p90", "p99")


class SloTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Condition that a run must meet: one figure of one latency under a bound, and nothing lost.

    Attributes:
        latency: ``ttft``, ``tpot`` or ``e2e``.
        figure: ``mean``, ``p50``, ``p90`` or ``p99``.
        bound_s: Seconds.
    """

    latency: str = "ttft"
    figure: str = "p99"
    bound_s: float = 3.0

    def holds(self, summary: Summary) -> bool:
        """Whether a run kept it."""
        spread: LatencySpread = getattr(summary, f"{self.latency}_s")
        return not summary.lost and bool(getattr(spread, self.figure) < self.bound_s)


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """Range and tolerance of a capacity search.

    Attributes:
        low, high: Rates per second that the search begins with; widened where they do not bracket the capacity.
        tolerance: The search ends with a bracket of this width, requests per second.
    """

    low: float
    high: float
    tolerance: float


class FoundCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """One seed's capacity.

    Attributes:
        rate_per_s: The highest rate that held, as asked for; the lowest that did not is at most ``tolerance`` above.
        tried: Pairs of (rate, whether it held).
    """

    label: str
    seed: int
    rate_per_s: float
    tried: list[tuple[float, bool]]


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """Mean over seeds with its 95 % t-interval; the half width is nan for a single seed."""

    label: str
    seeds: int
    mean: float
    half_width: float


def parse_target(text: str) -> SloTarget:
    """A target from ``ttft.p99<3``, bound in seconds.

    Raises:
        ScenarioError: it is none.
    """
    what, less, bound = text.partition("<")
    latency, _dot, figure = what.strip().partition(".")
    try:
        bound_s = float(bound)
    except ValueError:
        bound_s = math.nan
    if not less or latency not in _LATENCIES or figure not in _FIGURES or not bound_s > 0:
        raise ScenarioError(f"--slo {text}: must be like ttft.p99<3: one of {_LATENCIES}, one of {_FIGURES}, seconds")
    return SloTarget(latency=latency, figure=figure, bound_s=bound_s)


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


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """State of a search after one more rate.

    Attributes:
        count: Rates tried.
        left: Rates still to try, if ``low`` and ``high`` bracket the capacity.
        low: The highest rate that held; 0 for none.
        high: The lowest that did not hold; before one is known, the next that would be tried.
    """

    label: str
    seed: int
    count: int
    left: int
    low: float
    high: float


def bisect(
    holds: Callable[[float], bool], search: Search, tell: Callable[[int, float, float], None] = lambda *_: None
) -> tuple[float, list[tuple[float, bool]]]:
    """The highest rate that holds, and what was tried. ``holds`` is taken to be true below some rate and false above.

    Args:
        tell: Called after each rate with the number tried, the highest that held and the lowest that did not.

    Returns 0 where not even ever lower rates hold.
    """
    tried: list[tuple[float, bool]] = []

    def test(rate: float) -> bool:
        tried.append((rate, holds(rate)))
        good = max((rate for rate, held in tried if held), default=0.0)
        tell(len(tried), good, min((rate for rate, held in tried if not held), default=max(search.high, 2 * good)))
        return tried[-1][1]

    low, high = search.low, search.high
    for _ in range(DOUBLINGS_MAX):
        if test(low):
            break
        low, high = low / 2, low
    else:
        return 0.0, tried
    for _ in range(DOUBLINGS_MAX):
        if any(rate == high for rate, _held in tried) or not test(high):
            break
        low, high = high, high * 2
    while high - low > search.tolerance:
        middle = (low + high) / 2
        low, high = (middle, high) if test(middle) else (low, middle)
    return low, tried


def find(
    work: tuple[Variant, RunInputs, SloTarget, Search], tell: Callable[[Tried], None] = lambda _: None
) -> FoundCapacity:
    """Searches the capacity of one variant with its seed; tells after each rate how far it is."""
    variant, surroundings, target, search = work

    def holds(rate_per_s: float) -> bool:
        return target.holds(summarise(surroundings.run(at_rate(variant.spec, rate_per_s))))

    def passed_on(count: int, low: float, high: float) -> None:
        left = max(0, math.ceil(math.log2(max(high - low, search.tolerance) / search.tolerance)))
        tell(Tried(label=variant.label, seed=variant.spec.seed, count=count, left=left, low=low, high=high))

    rate_per_s, tried = bisect(holds, search, passed_on)
    return FoundCapacity(label=variant.label, seed=variant.spec.seed, rate_per_s=rate_per_s, tried=tried)


def intervals(found: Sequence[FoundCapacity]) -> list[Interval]:
    """One interval per label, in order of appearance."""
    by_label: dict[str, list[float]] = {}
    for one in found:
        by_label.setdefault(one.label, []).append(one.rate_per_s)
    return [_interval(label, rates) for label, rates in by_label.items()]


def _interval(label: str, rates: list[float]) -> Interval:
    from scipy.stats import t as student  # scipy takes a while to import

    count = len(rates)
    mean = sum(rates) / count
    if count < 2:
        return Interval(label=label, seeds=count, mean=mean, half_width=math.nan)
    variance = sum((rate - mean) ** 2 for rate in rates) / (count - 1)
    half_width = float(student.ppf(0.975, count - 1)) * math.sqrt(variance / count)
    return Interval(label=label, seeds=count, mean=mean, half_width=half_width)
