"""Thresholds for the present instances, and whether those in force still fit."""

from __future__ import annotations

import pytest
from millrace.cascade.planner import CascadePlanner
from millrace.cascade.thresholds import choose_thresholds, misses_quality, outdated, simulated_under, thresholds_for

from tests.unit.test_cascade_planner import judged, problem


def test_thresholds_on_the_planned_replicas_are_as_good_as_the_plan():
    planner = CascadePlanner(problem())
    plan = planner.plan()
    assert plan is not None
    again = thresholds_for(planner, plan.deployments)
    assert again is not None
    assert again.meets
    assert again.p95_s <= plan.p95_s + 1e-9


def test_the_present_plan_is_kept_while_traffic_stays_and_outdated_when_it_doubles():
    planner = CascadePlanner(problem())
    plan = planner.plan()
    assert plan is not None
    assert outdated(planner, plan) == ""
    busier = CascadePlanner(problem(rate=60.0))
    assert "p95" in outdated(busier, plan)
    harder = CascadePlanner(problem(quality_min=99.0))
    assert "quality" in outdated(harder, plan)


@pytest.mark.parametrize(("seed", "threshold"), [(0, 10.0), (1, 70.0), (2, 95.0)])
def test_thresholds_in_force_give_way_only_to_better_ones(seed: int, threshold: float):
    planner = CascadePlanner(problem(sample=judged(seed=seed), rate=12.0))
    plan = planner.plan()
    assert plan is not None
    in_force = (threshold, threshold)
    now = simulated_under(planner, in_force, plan.deployments)
    assert now is not None
    found = choose_thresholds(planner, plan.deployments, in_force=in_force)
    assert found.design is not None
    assert found.kept == (found.design.routed.thresholds == in_force)
    missed, misses = misses_quality(planner, now.routed), misses_quality(planner, found.design.routed)
    assert misses <= missed
    if not missed:
        assert found.design.p95_s <= now.p95_s
    again = choose_thresholds(planner, plan.deployments, in_force=found.design.routed.thresholds)
    assert again.kept


def test_a_shortfall_that_the_sample_explains_is_no_miss():
    sample = judged(seed=1)
    planner = CascadePlanner(problem(sample=sample, use_confidence=False))
    plan = planner.plan()
    assert plan is not None
    routed = plan.routed
    half_a_bound = routed.quality + (routed.quality - routed.quality_low) / 2
    assert not misses_quality(
        CascadePlanner(problem(sample=sample, quality_min=half_a_bound, use_confidence=False)), routed
    )
    assert misses_quality(CascadePlanner(problem(sample=sample, quality_min=half_a_bound)), routed)
