"""Thresholds for the instances that a cascade has now, and whether those in force still fit the traffic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from millrace.cascade.capacity import TierDeployment
from millrace.cascade.planner import CascadeDesign, CascadePlanner
from millrace.cascade.routing import Routed, Thresholds, route, routings

#: Least reduction of p95, as a share, for which thresholds in force change: latencies are simulated on some hundred
#: requests only.
GAIN = 0.05

#: Least rise of quality for which they are changed, where a latency is asked for.
POINTS = 1.0


class ChosenThresholds(NamedTuple):
    """Thresholds to apply now.

    Attributes:
        design: None where no thresholds serve the traffic.
        kept: Whether they are the ones in force, because no others are better by the simulation.
    """

    design: CascadeDesign | None
    kept: bool = False


def choose_thresholds(
    planner: CascadePlanner, present: Sequence[TierDeployment], *, in_force: Thresholds | None = None
) -> ChosenThresholds:
    """The best thresholds on the present replicas; those in force where no others are better. None for none."""
    best = thresholds_for(planner, present)
    now = None if in_force is None else simulated_under(planner, in_force, present)
    if now is None or (best is not None and better_than_in_force(planner, now, best)):
        return ChosenThresholds(best)
    limit_s = planner.problem.latency_max_s
    meets = not misses_quality(planner, now.routed) and (limit_s is None or now.p95_s <= limit_s)
    return ChosenThresholds(replace(now, meets=meets, reason="no thresholds are better than those in force"), kept=True)


def simulated_under(
    planner: CascadePlanner,
    thresholds: Thresholds,
    deployments: Sequence[TierDeployment],
) -> CascadeDesign | None:
    """A plan in force under the planner's sample and rate; None where no tier has a replica."""
    tiers = _served_tiers(deployments)
    routed = route(planner.problem.sample, thresholds, tiers=tiers) if tiers else None
    return None if routed is None else _under(planner, routed, deployments)


def _served_tiers(deployments: Sequence[TierDeployment]) -> tuple[int, ...]:
    return tuple(tier for tier, deployment in enumerate(deployments) if deployment.replicas)


def outdated(planner: CascadePlanner, planned: CascadeDesign, *, worse: float = 0.1) -> str:
    """Return why a plan no longer fits the planner's traffic; empty if it still fits.

    Args:
        planned: With its p95 as planned.
        worse: Rise of p95 that counts, as a share.
    """
    now = simulated_under(planner, planned.routed.thresholds, planned.deployments)
    if now is None:
        return "no tier has a replica"
    if misses_quality(planner, now.routed):
        return f"quality is {now.routed.quality:.1f}, asked for {planner.problem.quality_min:g}"
    if now.p95_s > (1 + worse) * planned.p95_s:
        return f"p95 is {now.p95_s:.1f} s, planned {planned.p95_s:.1f} s"
    return ""


def misses_quality(planner: CascadePlanner, routed: Routed) -> bool:
    """Whether a plan in force gives less quality than asked for, beyond what the size of the sample explains.

    Plans are held to the mean of the sample they were made from, or to its lower confidence bound. On another sample
    of the same traffic half of all plans fall below the same bar; so the bar is one bound lower here.
    """
    wanted = planner.problem.quality_min
    margin = 0.0 if planner.problem.use_confidence else routed.quality - routed.quality_low
    return wanted is not None and routed.quality + margin < wanted


def better_than_in_force(planner: CascadePlanner, now: CascadeDesign, other: CascadeDesign) -> bool:
    """Whether other thresholds on the same replicas are worth a change from those in force."""
    limit_s = planner.problem.latency_max_s
    if limit_s is not None:
        if now.p95_s > limit_s:
            return other.p95_s <= (1 - GAIN) * now.p95_s
        return other.p95_s <= limit_s and other.routed.quality >= now.routed.quality + POINTS
    if misses_quality(planner, now.routed):
        return other.meets or other.routed.quality >= now.routed.quality + POINTS
    return other.meets and other.p95_s <= (1 - GAIN) * now.p95_s


def thresholds_for(planner: CascadePlanner, deployments: Sequence[TierDeployment]) -> CascadeDesign | None:
    """The best thresholds on replicas as they are; None where there are none. Tiers without one are passed over.

    Routings that another one beats in quality and in the share of every tier are left out; the rest are simulated.
    """
    tiers = _served_tiers(deployments)
    if not tiers:
        return None
    sample, most = planner.problem.sample, planner.problem.thresholds_most
    coarse = planner.best(_served(planner, deployments, routings(sample, most, tiers=tiers)))
    if coarse is None:
        return None
    return planner.best([coarse, *_served(planner, deployments, planner.near(coarse.routed))])


def _served(
    planner: CascadePlanner,
    deployments: Sequence[TierDeployment],
    candidates: Sequence[Routed],
) -> list[CascadeDesign]:
    return [_under(planner, routed, deployments) for routed in _not_dominated(candidates, planner)]


def _not_dominated(candidates: Sequence[Routed], planner: CascadePlanner) -> list[Routed]:
    kept: list[Routed] = []
    for routed in sorted(candidates, key=lambda each: (-planner.quality(each), sum(each.shares))):
        if not any(all(np.less_equal(other.shares, routed.shares)) for other in kept):
            kept.append(routed)
    return kept


def _under(planner: CascadePlanner, routed: Routed, deployments: Sequence[TierDeployment]) -> CascadeDesign:
    return planner.simulated(CascadeDesign(routed=routed, deployments=tuple(deployments), tier_latency_s=math.nan))
