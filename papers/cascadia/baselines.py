"""Other ways to serve the same requests on the same GPUs: what a cascade plan is compared with.

Each is a policy: a planner's problem in, a design out (None where the GPUs are not enough). All use the same latency
curves, the same dispatch and the same end-to-end simulation as the plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from millrace.cascade.routing import REJECT_ALL, Routed, route
from millrace.cascade.sample import Integers

from papers.cascadia.capacity import TierCapacity, TierDeployment
from papers.cascadia.planner import CascadeDesign, CascadePlanner

#: GPUs of a server: tensor parallelism does not leave it.
SERVER_GPUS = 8

#: Accepts whatever score.
ACCEPT_ALL = 0.0


class UniformShare(TierCapacity):
    """A tier that has a fixed number of GPUs, whatever it needs."""

    def __init__(self, tier: TierCapacity, share: int) -> None:
        super().__init__(tier.curves, tier.rate)
        self._share = share

    def need(self, latency_s: float, gpus: int) -> int | None:
        """The share; None where it is not enough, or more than ``gpus``."""
        if self._share > gpus or super().need(latency_s, self._share) is None:
            return None
        return self._share


class UniformWidth(TierCapacity):
    """A tier whose replicas span a server, or all of its GPUs where it has fewer."""

    def capacities(self, latency_s: float, gpus: int, *, enough: float = math.inf) -> list[float]:
        """Highest rate that keeps the latency, by number of GPUs from 0 on, up to the first that is enough."""
        rates = {shape.gpus: curve.highest_rate(latency_s) for shape, curve in self.curves if shape.pipeline == 1}
        found = [0.0]
        for count in range(1, gpus + 1):
            width = _width(count)
            found.append(max(found[-1], count // width * rates.get(width, 0.0)))
            if found[-1] >= enough:
                break
        return found

    def deployment(self, latency_s: float, gpus: int) -> TierDeployment:
        """The replicas behind ``capacities(latency_s, gpus)[gpus]``."""
        capacities = self.capacities(latency_s, gpus)
        count = next(count for count, rate in enumerate(capacities) if rate == capacities[gpus])
        for shape, curve in self.curves:
            if count and shape.gpus == _width(count) and shape.pipeline == 1:
                return TierDeployment(((shape, count // shape.gpus),), (curve.highest_rate(latency_s),))
        return TierDeployment((), ())


def _width(gpus: int) -> int:
    return min(SERVER_GPUS, 1 << (gpus.bit_length() - 1))


def stand_alone(planner: CascadePlanner) -> CascadeDesign | None:
    """The smallest single model that keeps the quality asked for, on all GPUs, in its best replicas.

    The model of best quality, flagged, where none keeps it.

    Raises:
        ValueError: the problem asks for no quality.
    """
    wanted = planner.problem.quality_min
    if wanted is None:
        raise ValueError("stand_alone needs a quality")
    routed = [_only(planner, tier) for tier in range(planner.problem.sample.tiers)]
    keeping = [each for each in routed if planner.problem.quality(each) >= wanted]
    chosen = keeping[0] if keeping else max(routed, key=planner.problem.quality)
    design = planner.deploy(chosen)
    return None if design is None else planner.problem.best([planner.simulated(design)])


def _only(planner: CascadePlanner, tier: int) -> Routed:
    sample = planner.problem.sample
    return route(sample, (REJECT_ALL,) * (sample.tiers - 1), tiers=(tier,))


def prompt_router(planner: CascadePlanner, entries: Sequence[Integers]) -> CascadeDesign | None:
    """Each request runs on one model, chosen by its prompt, and no answer is judged.

    Args:
        entries: Choices of a tier for each request of the sample, (N,) each; the best of them is taken.
    """
    accept = (ACCEPT_ALL,) * (planner.problem.sample.tiers - 1)
    designs = [planner.deploy(route(planner.problem.sample, accept, entry)) for entry in entries]
    return planner.problem.best([planner.simulated(design) for design in designs if design is not None])


def rate_only(planner: CascadePlanner, usual: CascadePlanner, *, own_thresholds: bool = False) -> CascadeDesign | None:
    """A plan from the rate alone, as CascadeServe plans: for usual traffic at the present rate.

    Args:
        usual: A planner of the same models and GPUs for all traffic: its lengths and its share of hard requests.
        own_thresholds: Keep the thresholds of that plan, too: nothing but the rate is then known of the traffic. Else
            they are the best ones for the traffic as it is on these replicas, which favours this baseline.
    """
    same_rate = CascadePlanner(replace(usual.problem, rate=planner.problem.rate), usual.model)
    planned = same_rate.plan()
    if planned is None:
        return None
    on_these = planner.thresholds_on(planned.deployments)
    if own_thresholds:
        found = on_these.under(planned.routed.thresholds)
    else:
        found = on_these.choose().design
    return None if found is None else CascadeDesign(**vars(found), deployments=planned.deployments)


class _Restricted(CascadePlanner):
    """A planner whose tiers may use GPUs in one way only."""

    def __init__(self, planner: CascadePlanner, rule: Callable[[TierCapacity], TierCapacity]) -> None:
        super().__init__(planner.problem, planner.model)
        self._rule = rule

    def tier(self, routed: Routed, index: int) -> TierCapacity:
        """Capacity of one tier, as the rule has it."""
        return self._rule(super().tier(routed, index))

    def shifted(self, design: CascadeDesign) -> list[CascadeDesign]:
        """None: the rule divides the GPUs."""
        return []


def uniform_allocation(planner: CascadePlanner) -> CascadeDesign | None:
    """The same number of GPUs for every tier, each in its best replicas; thresholds as planned."""
    share = planner.problem.gpus // planner.problem.sample.tiers
    return _Restricted(planner, lambda tier: UniformShare(tier, share)).plan()


def uniform_parallelism(planner: CascadePlanner) -> CascadeDesign | None:
    """Tensor parallelism within a server and replicas across servers for every model; the rest as planned.

    Source: Cascadia, section 4.3 (ablation).
    """
    return _Restricted(planner, lambda tier: UniformWidth(tier.curves, tier.rate)).plan()
