"""Baselines of cascade plans: each does what its name says, and none beats the exact allocation."""

from __future__ import annotations

import numpy as np
import pytest

from papers.cascadia.baselines import (
    UniformShare,
    UniformWidth,
    prompt_router,
    rate_only,
    stand_alone,
    uniform_allocation,
    uniform_parallelism,
)
from papers.cascadia.capacity import TierCapacity
from papers.cascadia.planner import CascadePlanner
from papers.cascadia.replicas import RateCurve
from papers.cascadia.tests.test_planner import engine, problem
from tests.unit.cascade_cases import judged

CURVE = RateCurve((1.0, 2.0), (1.0, 2.0))


def _planner(**changes: object) -> CascadePlanner:
    shapes = [[engine(factor, ways) for ways in (1, 2, 4, 8)] for factor in (1.0, 3.0, 8.0)]
    return CascadePlanner(problem(shapes=shapes, **changes))


def test_a_uniform_share_is_taken_whole_or_not_at_all():
    tier = UniformShare(TierCapacity([(engine(1.0), CURVE)], rate=3.0), 4)
    assert tier.need(2.0, 12) == 4  # two would do
    assert tier.need(2.0, 3) is None
    assert UniformShare(TierCapacity([(engine(1.0), CURVE)], rate=9.0), 4).need(2.0, 12) is None


def test_a_uniform_width_spans_the_server():
    tier = UniformWidth([(engine(1.0, ways), CURVE) for ways in (1, 2, 4, 8)], rate=1.0)
    assert tier.capacities(2.0, 17) == [0.0, *[2.0] * 15, 4.0, 4.0]
    assert tier.deployment(2.0, 17).text() == "2×tp8"
    assert tier.deployment(2.0, 3).text() == "1×tp1"  # wider adds nothing here
    assert tier.deployment(2.0, 0).text() == "none"


def test_one_model_alone_is_the_smallest_that_is_good_enough():
    design = stand_alone(_planner(quality_min=60.0))
    assert design is not None
    assert design.routed.shares == (1.0, 0.0, 0.0)
    assert design.meets
    assert 1 <= sum(design.gpus) <= 12
    best = stand_alone(_planner(quality_min=85.0))
    assert best is not None
    assert best.routed.shares == (0.0, 0.0, 1.0)
    none = stand_alone(_planner(quality_min=99.0))
    assert none is not None
    assert not none.meets


def test_one_model_alone_needs_a_quality():
    with pytest.raises(ValueError, match="quality"):
        stand_alone(_planner(quality_min=None, latency_max_s=5.0))


def test_a_router_runs_each_request_once():
    planner = _planner(quality_min=70.0)
    entry = np.arange(planner.problem.sample.count) % 3
    design = prompt_router(planner, [entry])
    assert design is not None
    assert sum(design.routed.shares) == pytest.approx(1.0)
    assert (design.routed.answered_by == entry).all()


@pytest.mark.parametrize("baseline", [uniform_allocation, uniform_parallelism])
def test_uniform_plans_keep_quality_and_are_not_faster_by_allocation(baseline):
    planner = _planner()
    plan, design = planner.plan(), baseline(planner)
    assert plan is not None
    assert design is not None
    assert design.meets
    free = planner.deploy(design.routed)
    assert free is not None
    assert design.tier_latency_s >= free.tier_latency_s - 1e-6
    assert sum(design.gpus) <= 12


def test_uniform_allocation_gives_every_tier_the_same():
    design = uniform_allocation(_planner())
    assert design is not None
    assert max(design.gpus) <= 4


def test_planning_by_rate_takes_the_replicas_of_usual_traffic_and_the_best_thresholds_on_them():
    planner, usual = _planner(), _planner(sample=judged(seed=9), rate=1.0)
    design = rate_only(planner, usual)
    assert design is not None
    assert design.meets
    same = rate_only(planner, _planner(rate=1.0))
    plan = planner.plan()
    assert same is not None
    assert plan is not None
    assert same.deployments == plan.deployments
