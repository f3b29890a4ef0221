"""Thresholds and GPUs of a cascade planned together.

``CascadePlanner`` goes through every distinct routing of the sample on a grid, for each choice of models, allocates
GPUs for each exactly, simulates the end-to-end latency of the promising ones and picks. ``plan_as_published`` is the
paper's bi-level loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from millrace.cascade.candidates import shifts, thinned
from millrace.cascade.capacity import NO_REPLICAS, TierCapacity, TierDeployment, allocate
from millrace.cascade.chain import ChainLoad, chain_latencies, chain_p95_s
from millrace.cascade.judge_tier import JudgeTier, judging_latency_s
from millrace.cascade.objective import latency_quality_score
from millrace.cascade.replicas import ReplicaModel, ReplicaShape, TierWorkload
from millrace.cascade.routing import (
    Routed,
    Thresholds,
    initial_thresholds,
    route,
    routings_near,
    subset_routings,
    threshold_choices,
)
from millrace.cascade.sample import JudgedSample

#: Latency beyond which an allocation counts as no service at all, seconds.
LATENCY_S_MAX = 600.0

#: Below so many judged requests the quality of thresholds is known too badly: planned on 50 requests, thresholds miss
#: their target in 39 % of cases, on 400 in 11 % (bootstrap over WildBench's scores).
JUDGED_REQUESTS_MIN = 400

#: Candidates by allocation whose end-to-end latency is simulated.
SIMULATED_MAX = 24

#: The same of those that send fewest requests to the tiers.
LEAN_MAX = 12

#: Other divisions of GPUs tried of the best design, and least fall of its p95, as a share, for which one is taken: less
#: does not hold for other requests than those that were planned with.
SHIFTED_MAX = 60
SHIFT_GAIN = 0.05

#: Span of a simulation, and most requests of a sample smaller than that.
SIMULATED_S = 60.0
SIMULATED_REQUESTS_MAX = 2_000

#: Thresholds tried per tier between the grid's neighbours of the best ones.
REFINED_THRESHOLDS = 8

#: Iterations of the published loop without a better score before it ends (the paper's K, which it does not give).
STABLE_ITERATIONS = 3

#: Weight of a missing quality in the published score (the paper's μ, given in its example only).
PUBLISHED_WEIGHT = 100.0


CapacityRule = Callable[[TierCapacity], TierCapacity]


@dataclass(frozen=True, kw_only=True)
class CascadeProblem:
    """Planning problem of one cascade.

    Attributes:
        sample: Judged requests.
        rate: Requests/s that the cascade gets.
        gpus: In all.
        shapes: By tier, ways to run its model; those that do not fit in memory are left out by the caller.
        judge_s: By tier but the last, seconds that judging an answer takes.
        quality_min: Mean quality asked for, 0 to 100; None where ``latency_max_s`` is given.
        latency_max_s: p95 asked for; the plan then has the best quality within it.
        use_confidence: Hold the lower confidence bound of quality, not the mean, to ``quality_min``.
        thresholds_most: Thresholds tried per tier.
        judge: A model of the cluster that judges, on GPUs of its own among ``gpus``; its p95 is added to ``judge_s``.
            None for a judge that needs no GPU.
    """

    sample: JudgedSample
    rate: float
    gpus: int
    shapes: Sequence[Sequence[ReplicaShape]]
    judge_s: Sequence[float]
    quality_min: float | None = None
    latency_max_s: float | None = None
    use_confidence: bool = True
    thresholds_most: int = 12
    judge: JudgeTier | None = None

    def __post_init__(self) -> None:
        """Raises ValueError naming the field that is wrong."""
        if (self.quality_min is None) == (self.latency_max_s is None):
            raise ValueError("one of quality_min and latency_max_s is needed, and not both")
        if self.rate <= 0 or self.gpus < 1:
            raise ValueError("rate must be positive and gpus at least 1")
        if len(self.shapes) != self.sample.tiers or len(self.judge_s) != self.sample.tiers - 1:
            raise ValueError("shapes needs an entry per tier, judge_s one per tier but the last")


@dataclass(frozen=True, kw_only=True)
class CascadeDesign:
    """A planned cascade.

    Attributes:
        routed: Its thresholds and what they do to the sample.
        deployments: By tier.
        tier_latency_s: p95 that every tier keeps by allocation.
        p95_s: Simulated end-to-end p95; NaN where it was not simulated.
        meets: Whether quality or latency is as asked for.
        reason: One sentence.
        judge: Replicas of the judging model.
        judge_latency_s: p95 of its verdicts.
    """

    routed: Routed
    deployments: tuple[TierDeployment, ...]
    tier_latency_s: float
    p95_s: float = math.nan
    meets: bool = True
    reason: str = ""
    judge: TierDeployment = NO_REPLICAS
    judge_latency_s: float = 0.0

    @property
    def members(self) -> tuple[TierDeployment, ...]:
        """Deployments of all tiers, and last the judge's."""
        return (*self.deployments, self.judge)

    @property
    def gpus(self) -> tuple[int, ...]:
        """GPUs of each tier; the judge's are ``judge.gpus``."""
        return tuple(deployment.gpus for deployment in self.deployments)


@dataclass
class CascadePlanner:
    """Plans one problem; rate curves are simulated once and kept.

    Attributes:
        model: Simulates replicas.
        allocations: Allocations computed so far.
    """

    problem: CascadeProblem
    model: ReplicaModel = field(default_factory=ReplicaModel)
    allocations: int = 0

    def plan(self, capacity_of: CapacityRule | None = None) -> CascadeDesign | None:
        """The best plan; the one of best quality (or least latency), flagged, where none meets what is asked.

        Thresholds are searched on a grid, and then between its neighbours of the best ones. None where no routing can
        be served at all.

        Args:
            capacity_of: As for ``front``.
        """
        everything = subset_routings(self.problem.sample, self.problem.thresholds_most)
        coarse = self.best(self._simulated(everything, capacity_of))
        if coarse is None:
            return None
        best = self.best([coarse, *self._simulated(self.near(coarse.routed), capacity_of)])
        if best is None or capacity_of is not None:
            return best
        return self.best([best, *self._shifted(best)])

    def _shifted(self, design: CascadeDesign) -> list[CascadeDesign]:
        """Simulated designs on a way of falling p95, each with some GPUs moved from one tier to another."""
        found, tried = [design], 0
        while tried < SHIFTED_MAX:
            best = found[-1]
            for given in shifts(best.gpus, best.routed.shares):
                tried += 1
                other = self._on(best, given)
                if other is not None and other.p95_s <= (1 - SHIFT_GAIN) * best.p95_s:
                    found.append(other)
                    break
            if found[-1] is best:
                break
        return found[1:]

    def _on(self, design: CascadeDesign, given: Sequence[int]) -> CascadeDesign | None:
        """The design on other numbers of GPUs, simulated; None where a tier's are not enough."""
        tiers = [self.tier(design.routed, index) for index in range(len(given))]
        latencies = [
            tier.least_latency_s(count) if tier.rate > 0 else 0.0 for tier, count in zip(tiers, given, strict=True)
        ]
        if not all(map(math.isfinite, latencies)):
            return None
        rows = zip(tiers, latencies, given, strict=True)
        deployments = tuple(tier.deployment(latency_s, count) for tier, latency_s, count in rows)
        return self.simulated(replace(design, deployments=deployments, tier_latency_s=max(latencies)))

    def near(self, routed: Routed) -> list[Routed]:
        """Routings between the grid's neighbours of one of its routings."""
        problem = self.problem
        grid, most = problem.thresholds_most, REFINED_THRESHOLDS
        return routings_near(problem.sample, routed, grid=grid, most=most)

    def best(self, designs: Sequence[CascadeDesign]) -> CascadeDesign | None:
        """Of simulated designs the one that fits best, flagged where none meets what is asked; None of none."""
        if not designs:
            return None
        problem = self.problem
        if problem.quality_min is not None:
            fitting = [design for design in designs if self.quality(design.routed) >= problem.quality_min]
            if fitting:
                best = min(fitting, key=lambda design: design.p95_s)
                return _with(
                    best, True, f"least p95 of {len(fitting)} routings that keep quality {problem.quality_min:g}"
                )
            best = max(designs, key=lambda design: (self.quality(design.routed), -design.p95_s))
            return _with(best, False, f"no routing keeps quality {problem.quality_min:g}; the best one found")
        assert problem.latency_max_s is not None, "a problem asks for quality or for latency"
        fitting = [design for design in designs if design.p95_s <= problem.latency_max_s]
        if fitting:
            best = max(fitting, key=lambda design: (self.quality(design.routed), -design.p95_s))
            return _with(best, True, f"best quality of {len(fitting)} routings within {problem.latency_max_s:g} s")
        best = min(designs, key=lambda design: design.p95_s)
        return _with(best, False, f"no routing stays within {problem.latency_max_s:g} s; the fastest one")

    def front(self, capacity_of: CapacityRule | None = None) -> list[CascadeDesign]:
        """Designs that no other beats in both quality and allocated latency, each with its simulated p95.

        Args:
            capacity_of: Restricts how tiers may use GPUs (``baselines.py``); None for every mixture of replicas.
        """
        everything = subset_routings(self.problem.sample, self.problem.thresholds_most)
        return self._simulated(everything, capacity_of, lean=False)

    def _simulated(
        self, candidates: Sequence[Routed], capacity_of: CapacityRule | None, *, lean: bool = True
    ) -> list[CascadeDesign]:
        """The front of some routings, and those that send fewest requests to the tiers."""
        designs = [design for routed in candidates if (design := self.deploy(routed, capacity_of)) is not None]
        kept = thinned(_not_beaten(designs, self.quality), SIMULATED_MAX)
        known = {id(design) for design in kept}
        more = thinned(self._lean(designs), LEAN_MAX) if lean else []
        return [self.simulated(design) for design in [*kept, *(each for each in more if id(each) not in known)]]

    def _lean(self, designs: Sequence[CascadeDesign]) -> list[CascadeDesign]:
        """Designs that send fewest requests to the tiers among those that keep the quality asked for.

        Allocation compares the slowest tier's p95, by which one large model alone often beats a cascade that few
        requests go through: end to end the cascade may be much faster.
        """
        wanted = self.problem.quality_min
        keeping = [each for each in designs if wanted is None or self.quality(each.routed) >= wanted]
        kept: list[CascadeDesign] = []
        for design in sorted(keeping, key=lambda each: (sum(each.routed.shares), -self.quality(each.routed))):
            if not any(_sends_less(other.routed, design.routed, self.quality, wanted) for other in kept):
                kept.append(design)
        return kept

    def deploy(self, routed: Routed, capacity_of: CapacityRule | None = None) -> CascadeDesign | None:
        """The allocation of least tier latency for one routing; None where the GPUs are not enough."""
        self.allocations += 1
        problem = self.problem
        tiers = [self.tier(routed, index) for index in range(problem.sample.tiers)]
        if capacity_of is not None:
            tiers = [capacity_of(tier) for tier in tiers]
        judge = self.judge_tier(routed)
        allocated = allocate([judge, *tiers], problem.gpus, longest_s=LATENCY_S_MAX)
        if allocated is None:
            return None
        (judge_gpus, *needs), latency_s = allocated
        given = _spread(needs, problem.gpus - judge_gpus, [tier.rate for tier in tiers])
        judging = judge.deployment(latency_s, judge_gpus)
        return CascadeDesign(
            routed=routed,
            deployments=tuple(tier.deployment(latency_s, count) for tier, count in zip(tiers, given, strict=True)),
            tier_latency_s=latency_s,
            judge=judging,
            judge_latency_s=judging_latency_s(judge, judging),
        )

    def judge_tier(self, routed: Routed) -> TierCapacity:
        """Capacity of the judging model under a routing; nothing to serve where there is none."""
        judge = self.problem.judge
        return TierCapacity([], 0.0) if judge is None else judge.capacity(routed, self.problem.rate, self.model)

    def tier(self, routed: Routed, index: int) -> TierCapacity:
        """Capacity of one tier under a routing."""
        mask = routed.reached[:, index]
        rate = self.problem.rate * float(mask.mean())
        if not mask.any():
            return TierCapacity([], 0.0)
        sample = self.problem.sample
        workload = TierWorkload(sample.prompt_tokens[mask, index], sample.output_tokens[mask, index])
        key = bytes([index]) + np.packbits(mask).tobytes()
        curves = [
            (shape, curve)
            for shape in self.problem.shapes[index]
            if (curve := self.model.curve(workload, shape, key)) is not None
        ]
        return TierCapacity(curves, rate)

    def simulated(self, design: CascadeDesign) -> CascadeDesign:
        """The design with its end-to-end p95."""
        load = self.load()
        load = replace(load, judge_s=[each + design.judge_latency_s for each in load.judge_s])
        sample, native = self.problem.sample, self.model.native
        return replace(
            design,
            p95_s=chain_p95_s(chain_latencies(sample, design.routed, design.deployments, load, native=native)),
        )

    def load(self) -> ChainLoad:
        """Load of a simulation: a minute at the problem's rate, so that queues that grow show, within bounds."""
        problem = self.problem
        requests = max(problem.sample.count, JUDGED_REQUESTS_MIN, round(problem.rate * SIMULATED_S))
        return ChainLoad(
            rate=problem.rate,
            judge_s=problem.judge_s,
            requests=min(requests, max(problem.sample.count, SIMULATED_REQUESTS_MAX)),
            seed=self.model.seed,
        )

    def quality(self, routed: Routed) -> float:
        """The quality that is held to what is asked: the lower confidence bound, or the mean."""
        return routed.quality_low if self.problem.use_confidence else routed.quality


def plan_as_published(planner: CascadePlanner) -> CascadeDesign | None:
    """The paper's bi-level loop: deployment for fixed thresholds, then a better threshold, until J is stable.

    Each iteration moves one threshold to the value of least J with the others fixed, tiers in turn. Source: Cascadia,
    algorithm 1 and section 3.3; the paper names no search over thresholds, μ, or K.
    """
    problem = planner.problem
    if problem.quality_min is None:
        raise ValueError("the published loop plans for a quality")
    sample = problem.sample
    thresholds = initial_thresholds(sample)
    best, stable, tier = _published_score(planner, thresholds), 0, 0
    while sample.tiers > 1 and stable < STABLE_ITERATIONS * (sample.tiers - 1):
        choices = threshold_choices(sample.scores[:, tier], problem.thresholds_most)
        tried = {value: (*thresholds[:tier], value, *thresholds[tier + 1 :]) for value in choices}
        scored = {value: _published_score(planner, each) for value, each in tried.items()}
        chosen = min(scored, key=lambda value: scored[value])
        if scored[chosen] < best:
            best, thresholds, stable = scored[chosen], tried[chosen], 0
        else:
            stable += 1
        tier = (tier + 1) % (sample.tiers - 1)
    design = planner.deploy(route(sample, thresholds))
    return None if design is None else _with(planner.simulated(design), True, f"published loop, J = {best:.3g}")


def _published_score(planner: CascadePlanner, thresholds: Thresholds) -> float:
    problem = planner.problem
    routed = route(problem.sample, thresholds)
    design = planner.deploy(routed)
    if design is None:
        return math.inf
    assert problem.quality_min is not None, "checked by the caller"
    return latency_quality_score(
        design.tier_latency_s,
        routed.quality,
        quality_min=problem.quality_min,
        utopia=float(problem.sample.quality[:, -1].mean()),
        nadir=float(problem.sample.quality[:, 0].mean()),
        weight=PUBLISHED_WEIGHT,
    )


def _not_beaten(designs: Sequence[CascadeDesign], quality_of: Callable[[Routed], float]) -> list[CascadeDesign]:
    kept: list[CascadeDesign] = []
    for design in sorted(designs, key=lambda each: (each.tier_latency_s, -quality_of(each.routed))):
        if not kept or quality_of(design.routed) > quality_of(kept[-1].routed):
            kept.append(design)
    return kept


def _sends_less(one: Routed, other: Routed, quality_of: Callable[[Routed], float], wanted: float | None) -> bool:
    """Whether a routing sends no tier more requests than another one, and is as good where no quality is asked for."""
    fewer = all(a <= b for a, b in zip(one.shares, other.shares, strict=True))
    return fewer and (wanted is not None or quality_of(one) >= quality_of(other))


def _spread(needs: Sequence[int], gpus: int, rates: Sequence[float]) -> list[int]:
    """The needs, with spare GPUs to the tiers with the most requests per GPU."""
    given = list(needs)
    for _ in range(gpus - sum(needs)):
        used = [index for index, rate in enumerate(rates) if rate > 0]
        if not used:
            break
        chosen = max(used, key=lambda index: rates[index] / max(1, given[index]))
        given[chosen] += 1
    return given


def _with(design: CascadeDesign, meets: bool, reason: str) -> CascadeDesign:
    return replace(design, meets=meets, reason=reason)
