"""Thresholds and GPUs of a cascade planned together.

``CascadePlanner`` goes through every distinct routing of the sample on a grid, for each choice of models, allocates
GPUs for each exactly, simulates the end-to-end latency of the promising ones and picks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from millrace.cascade.routing import Routed, identity, routings
from millrace.cascade.sample import JudgedSample
from millrace.cascade.thresholds import ThresholdDesign, ThresholdPlanner, ThresholdProblem

from papers.cascadia.capacity import TierCapacity, TierDeployment, allocate, service_of
from papers.cascadia.replicas import ReplicaModel, ReplicaShape, TierWorkload

#: Latency beyond which an allocation counts as no service at all, seconds.
LATENCY_S_MAX = 600.0

#: Candidates by allocation whose end-to-end latency is simulated.
SIMULATED_MAX = 24

#: The same of those that send fewest requests to the tiers.
LEAN_MAX = 12

#: Other divisions of GPUs tried of the best design, and least fall of its p95, as a share, for which one is taken: less
#: does not hold for other requests than those that were planned with.
SHIFTED_MAX = 60
SHIFT_GAIN = 0.05


@dataclass(frozen=True, kw_only=True)
class CascadeProblem(ThresholdProblem):
    """Planning problem of one cascade whose GPUs are not divided yet.

    Attributes:
        gpus: In all.
        shapes: By tier, ways to run its model; those that do not fit in memory are left out by the caller.
    """

    gpus: int
    shapes: Sequence[Sequence[ReplicaShape]]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gpus < 1:
            raise ValueError("gpus must be at least 1")
        if len(self.shapes) != self.sample.tiers:
            raise ValueError("shapes needs an entry per tier")


@dataclass(frozen=True, kw_only=True)
class CascadeDesign(ThresholdDesign):
    """A planned cascade.

    Attributes:
        deployments: By tier.
        tier_latency_s: p95 that every tier keeps by allocation.
    """

    deployments: tuple[TierDeployment, ...]
    tier_latency_s: float = math.nan

    @property
    def gpus(self) -> tuple[int, ...]:
        return tuple(deployment.gpus for deployment in self.deployments)


@dataclass
class CascadePlanner:
    """Plans one problem; rate curves are simulated once and kept.

    Attributes:
        model: Simulates replicas.
    """

    problem: CascadeProblem
    model: ReplicaModel = field(default_factory=ReplicaModel)

    def plan(self) -> CascadeDesign | None:
        """The best plan; the one of best quality (or least latency), flagged, where none meets what is asked.

        Thresholds are searched on a grid, and then between its neighbours of the best ones. None where no routing can
        be served at all.
        """
        everything = subset_routings(self.problem.sample, self.problem.thresholds_most)
        coarse = self.problem.best(self._simulated(everything))
        if coarse is None:
            return None
        best = self.problem.best([coarse, *self._simulated(self.problem.near(coarse.routed))])
        return None if best is None else self.problem.best([best, *self.shifted(best)])

    def shifted(self, design: CascadeDesign) -> list[CascadeDesign]:
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

    def front(self) -> list[CascadeDesign]:
        """Designs that no other beats in both quality and allocated latency, each with its simulated p95."""
        everything = subset_routings(self.problem.sample, self.problem.thresholds_most)
        return self._simulated(everything, lean=False)

    def _simulated(self, candidates: Sequence[Routed], *, lean: bool = True) -> list[CascadeDesign]:
        """The front of some routings, and those that send fewest requests to the tiers."""
        designs = [design for routed in candidates if (design := self.deploy(routed)) is not None]
        kept = thinned(_not_beaten(designs, self.problem.quality), SIMULATED_MAX)
        known = {id(design) for design in kept}
        more = thinned(self._lean(designs), LEAN_MAX) if lean else []
        return [self.simulated(design) for design in [*kept, *(each for each in more if id(each) not in known)]]

    def _lean(self, designs: Sequence[CascadeDesign]) -> list[CascadeDesign]:
        """Designs that send fewest requests to the tiers among those that keep the quality asked for.

        Allocation compares the slowest tier's p95, by which one large model alone often beats a cascade that few
        requests go through: end to end the cascade may be much faster.
        """
        wanted = self.problem.quality_min
        keeping = [each for each in designs if wanted is None or self.problem.quality(each.routed) >= wanted]
        kept: list[CascadeDesign] = []
        for design in sorted(keeping, key=lambda each: (sum(each.routed.shares), -self.problem.quality(each.routed))):
            if not any(_sends_less(other.routed, design.routed, self.problem.quality, wanted) for other in kept):
                kept.append(design)
        return kept

    def deploy(self, routed: Routed) -> CascadeDesign | None:
        """The allocation of least tier latency for one routing; None where the GPUs are not enough."""
        problem = self.problem
        tiers = [self.tier(routed, index) for index in range(problem.sample.tiers)]
        allocated = allocate(tiers, problem.gpus, longest_s=LATENCY_S_MAX)
        if allocated is None:
            return None
        needs, latency_s = allocated
        given = _spread(needs, problem.gpus, [tier.rate for tier in tiers])
        return CascadeDesign(
            routed=routed,
            deployments=tuple(tier.deployment(latency_s, count) for tier, count in zip(tiers, given, strict=True)),
            tier_latency_s=latency_s,
        )

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
        tiers = [service_of(each) for each in design.deployments]
        return replace(design, p95_s=self.problem.p95_s(design.routed, tiers, seed=self.model.seed))

    def thresholds_on(self, deployments: Sequence[TierDeployment]) -> ThresholdPlanner:
        """The core's planner of thresholds, for replicas as they are."""
        return ThresholdPlanner(self.problem, [service_of(each) for each in deployments])


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


def subset_routings(sample: JudgedSample, most: int) -> list[Routed]:
    """Every distinct routing of each choice of tiers: a model that is left out needs no GPU."""
    found: dict[bytes, Routed] = {}
    for count in range(sample.tiers, 0, -1):
        for asked in itertools.combinations(range(sample.tiers), count):
            for routed in routings(sample, most, tiers=asked):
                found.setdefault(identity(routed), routed)
    return list(found.values())


def shifts(gpus: Sequence[int], shares: Sequence[float]) -> Iterator[list[int]]:
    """Other divisions of the GPUs: 8, 4, 2 or 1 of one tier's go to another one that is reached."""
    reached = [tier for tier, share in enumerate(shares) if share > 0]
    for count, source, target in itertools.product((8, 4, 2, 1), reached, reached):
        if source != target and gpus[source] > count:
            given = list(gpus)
            given[source] -= count
            given[target] += count
            yield given


def thinned(found: list[CascadeDesign], most: int) -> list[CascadeDesign]:
    """At most so many, evenly spaced."""
    if len(found) <= most:
        return found
    return [found[position] for position in np.unique(np.linspace(0, len(found) - 1, most).round().astype(int))]
