"""Thresholds of a cascade on the instances that it has, and whether those in force still fit the traffic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np

from millrace.cascade.chain import ChainLoad, TierService, chain_latencies, chain_p95_s
from millrace.cascade.routing import Routed, Thresholds, route, routings, routings_near
from millrace.cascade.sample import JudgedSample

#: Below so many judged requests the quality of thresholds is known too badly: planned on 50 requests, thresholds miss
#: their target in 39 % of cases, on 400 in 11 % (bootstrap over WildBench's scores).
JUDGED_REQUESTS_MIN = 400

#: Span of a simulation, and most requests of a sample smaller than that.
SIMULATED_S = 60.0
SIMULATED_REQUESTS_MAX = 2_000

#: Thresholds tried per tier between the grid's neighbours of the best ones.
REFINED_THRESHOLDS = 8

#: Least reduction of p95, as a share, for which thresholds in force change: latencies are simulated on some hundred
#: requests only.
GAIN = 0.05

#: Least rise of quality for which they are changed, where a latency is asked for.
POINTS = 1.0

#: Rise of p95 over the planned one, as a share, from which a plan no longer fits.
WORSE = 0.1


@dataclass(frozen=True, kw_only=True)
class ThresholdDesign:
    """Thresholds and what they do.

    Attributes:
        routed: The thresholds, and how they route the sample.
        p95_s: Simulated end-to-end p95; NaN where it was not simulated.
        meets: Whether quality or latency is as asked for.
    """

    routed: Routed
    p95_s: float = math.nan
    meets: bool = True
    reason: str = ""


D = TypeVar("D", bound=ThresholdDesign)


@dataclass(frozen=True, kw_only=True)
class ThresholdProblem:
    """Planning problem of one cascade.

    Attributes:
        rate: Requests/s that the cascade gets.
        judge_s: By tier but the last, seconds that judging an answer takes.
        quality_min: Mean quality asked for, 0 to 100; None where ``latency_max_s`` is given.
        latency_max_s: p95 asked for; the plan then has the best quality within it.
        use_confidence: Hold the lower confidence bound of quality, not the mean, to ``quality_min``.
        thresholds_most: Thresholds tried per tier.
    """

    sample: JudgedSample
    rate: float
    judge_s: Sequence[float]
    quality_min: float | None = None
    latency_max_s: float | None = None
    use_confidence: bool = True
    thresholds_most: int = 12

    def __post_init__(self) -> None:
        if (self.quality_min is None) == (self.latency_max_s is None):
            raise ValueError("one of quality_min and latency_max_s is needed, and not both")
        if self.rate <= 0:
            raise ValueError("rate must be positive")
        if len(self.judge_s) != self.sample.tiers - 1:
            raise ValueError("judge_s needs an entry per tier but the last")

    def quality(self, routed: Routed) -> float:
        """The quality that is held to what is asked: the lower confidence bound, or the mean."""
        return routed.quality_low if self.use_confidence else routed.quality

    def misses_quality(self, routed: Routed) -> bool:
        """Whether a plan in force gives less quality than asked for, beyond what the size of the sample explains.

        Plans are held to the mean of the sample they were made from, or to its lower confidence bound. On another
        sample of the same traffic half of all plans fall below the same bar; so the bar is one bound lower here.
        """
        margin = 0.0 if self.use_confidence else routed.quality - routed.quality_low
        return self.quality_min is not None and routed.quality + margin < self.quality_min

    def load(self, seed: int = 0) -> ChainLoad:
        """Load of a simulation: a minute at the problem's rate, so that queues that grow show, within bounds."""
        requests = max(self.sample.count, JUDGED_REQUESTS_MIN, round(self.rate * SIMULATED_S))
        most = max(self.sample.count, SIMULATED_REQUESTS_MAX)
        return ChainLoad(rate=self.rate, judge_s=self.judge_s, requests=min(requests, most), seed=seed)

    def p95_s(self, routed: Routed, tiers: Sequence[TierService | None], *, seed: int = 0) -> float:
        """Simulated end-to-end p95, seconds."""
        return chain_p95_s(chain_latencies(self.sample, routed, tiers, self.load(seed)))

    def near(self, routed: Routed) -> list[Routed]:
        """Routings between the grid's neighbours of some thresholds."""
        return routings_near(self.sample, routed, grid=self.thresholds_most, most=REFINED_THRESHOLDS)

    def best(self, designs: Sequence[D]) -> D | None:
        """Of simulated designs the one that fits best, flagged where none meets what is asked; None of none."""
        if not designs:
            return None
        if self.quality_min is not None:
            asked = self.quality_min
            fitting = [design for design in designs if self.quality(design.routed) >= asked]
            if fitting:
                best = min(fitting, key=lambda design: design.p95_s)
                return _with(best, True, f"least p95 of {len(fitting)} routings that keep quality {asked:g}")
            best = max(designs, key=lambda design: (self.quality(design.routed), -design.p95_s))
            return _with(best, False, f"no routing keeps quality {asked:g}; the best one found")
        assert self.latency_max_s is not None, "a problem asks for quality or for latency"
        fitting = [design for design in designs if design.p95_s <= self.latency_max_s]
        if fitting:
            best = max(fitting, key=lambda design: (self.quality(design.routed), -design.p95_s))
            return _with(best, True, f"best quality of {len(fitting)} routings within {self.latency_max_s:g} s")
        best = min(designs, key=lambda design: design.p95_s)
        return _with(best, False, f"no routing stays within {self.latency_max_s:g} s; the fastest one")


def _with(design: D, meets: bool, reason: str) -> D:
    return replace(design, meets=meets, reason=reason)


class ChosenThresholds(NamedTuple):
    """Thresholds to apply now.

    Attributes:
        design: None where no thresholds serve the traffic.
        designs: All that it was chosen from.
        kept: Whether they are the ones in force, because no others are better by the simulation.
    """

    design: ThresholdDesign | None
    designs: Sequence[ThresholdDesign]
    kept: bool = False


@dataclass(frozen=True)
class ThresholdPlanner:
    """Plans the thresholds of a problem for tiers as they are. Tiers without an instance (None) are passed over."""

    problem: ThresholdProblem
    tiers: Sequence[TierService | None]

    def under(self, thresholds: Thresholds) -> ThresholdDesign | None:
        """Thresholds under the problem's sample and rate; None where no tier has an instance."""
        served = self._served
        return self._simulated(route(self.problem.sample, thresholds, tiers=served)) if served else None

    def designs(self) -> list[ThresholdDesign]:
        """Routings of a grid, and between its neighbours of the best one, simulated; none where no tier serves.

        Routings that another one beats in quality and in the share of every tier are left out.
        """
        served, problem = self._served, self.problem
        if not served:
            return []
        grid = self._simulated_all(routings(problem.sample, problem.thresholds_most, tiers=served))
        best = problem.best(grid)
        return [*grid, *(self._simulated_all(problem.near(best.routed)) if best is not None else [])]

    def choose(self, in_force: Thresholds | None = None) -> ChosenThresholds:
        """The best thresholds; those in force where no others are better. None for none."""
        problem, designs = self.problem, self.designs()
        best = problem.best(designs)
        now = None if in_force is None else self.under(in_force)
        if now is None or (best is not None and self._better(now, best)):
            return ChosenThresholds(best, designs)
        limit_s = problem.latency_max_s
        meets = not problem.misses_quality(now.routed) and (limit_s is None or now.p95_s <= limit_s)
        reason = "no thresholds are better than those in force"
        return ChosenThresholds(replace(now, meets=meets, reason=reason), designs, kept=True)

    def outdated(self, thresholds: Thresholds, planned_p95_s: float | None = None) -> str:
        """Return why a plan no longer fits the traffic; empty if it still fits. ``planned_p95_s``: None for unknown."""
        problem, now = self.problem, self.under(thresholds)
        if now is None:
            return "no tier has an instance"
        if problem.misses_quality(now.routed):
            return f"quality is {now.routed.quality:.1f}, asked for {problem.quality_min:g}"
        if planned_p95_s is not None and now.p95_s > (1 + WORSE) * planned_p95_s:
            return f"p95 is {now.p95_s:.1f} s, planned {planned_p95_s:.1f} s"
        return ""

    def _better(self, now: ThresholdDesign, other: ThresholdDesign) -> bool:
        """Whether other thresholds are worth a change from those in force."""
        limit_s = self.problem.latency_max_s
        if limit_s is not None:
            if now.p95_s > limit_s:
                return other.p95_s <= (1 - GAIN) * now.p95_s
            return other.p95_s <= limit_s and other.routed.quality >= now.routed.quality + POINTS
        if self.problem.misses_quality(now.routed):
            return other.meets or other.routed.quality >= now.routed.quality + POINTS
        return other.meets and other.p95_s <= (1 - GAIN) * now.p95_s

    @property
    def _served(self) -> tuple[int, ...]:
        return tuple(tier for tier, service in enumerate(self.tiers) if service is not None)

    def _simulated_all(self, candidates: Sequence[Routed]) -> list[ThresholdDesign]:
        kept: list[Routed] = []
        for routed in sorted(candidates, key=lambda each: (-self.problem.quality(each), sum(each.shares))):
            if not any(all(np.less_equal(other.shares, routed.shares)) for other in kept):
                kept.append(routed)
        return [self._simulated(routed) for routed in kept]

    def _simulated(self, routed: Routed) -> ThresholdDesign:
        return ThresholdDesign(routed=routed, p95_s=self.problem.p95_s(routed, self.tiers))
