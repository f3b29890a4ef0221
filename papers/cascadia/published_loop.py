"""The paper's bi-level loop: deployment for fixed thresholds, then a better threshold.

Source: Cascadia, algorithm 1 and section 3.3.
"""

from __future__ import annotations

import math
from dataclasses import replace

from millrace.cascade.routing import Thresholds, initial_thresholds, route, threshold_choices

from papers.cascadia.objective import latency_quality_score
from papers.cascadia.planner import CascadeDesign, CascadePlanner

#: Iterations without a better score before the loop ends (the paper's K, which it does not give).
STABLE_ITERATIONS = 3

#: Weight of a missing quality in the score (the paper's μ, given in its example only).
PUBLISHED_WEIGHT = 100.0


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
    return None if design is None else replace(planner.simulated(design), reason=f"published loop, J = {best:.3g}")


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
