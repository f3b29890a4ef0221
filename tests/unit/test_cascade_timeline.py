"""Cascades over time: replicas that come and go, and plans made again."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from millrace.cascade.capacity import TierDeployment
from millrace.cascade.planner import CascadePlanner
from millrace.cascade.replanning import (
    MoveCost,
    misses_quality,
    moved,
    outdated,
    replan,
    simulated_under,
    thresholds_for,
)
from millrace.cascade.replicas import NS
from millrace.cascade.routing import REJECT_ALL
from millrace.cascade.sample import JudgedSample
from millrace.cascade.timeline import FOREVER_NS, PlacedReplica, Timeline, run_timeline

from tests.unit.test_cascade_planner import engine, judged, problem

SMALL, LARGE = engine(1.0), engine(8.0)


def _answers(scores: list[float]) -> JudgedSample:
    count = len(scores)
    return JudgedSample(
        scores=np.array([scores]).T,
        quality=np.column_stack([np.full(count, 40.0), np.full(count, 90.0)]),
        prompt_tokens=np.full((count, 2), 100),
        output_tokens=np.full((count, 2), 20),
    )


def _timeline(small: list[PlacedReplica], large: list[PlacedReplica], *changes: tuple[int, float]) -> Timeline:
    return Timeline(tiers=(small, large), thresholds=[(at, (value,)) for at, value in changes], judge_s=(0.0,))


def _replica(shape=SMALL, from_ns: int = 0, until_ns: int = FOREVER_NS) -> PlacedReplica:
    return PlacedReplica(shape=shape, weight=1.0, from_ns=from_ns, until_ns=until_ns)


def test_an_answer_is_judged_by_the_thresholds_in_force_when_it_is_there():
    outcomes = run_timeline(
        _answers([50.0, 50.0]), [0, 5 * NS], _timeline([_replica()], [_replica(LARGE)], (0, 40.0), (4 * NS, 60.0))
    )
    assert outcomes.answered_by.tolist() == [0, 1]
    assert outcomes.quality.tolist() == [40.0, 90.0]
    assert outcomes.latency_s[1] > outcomes.latency_s[0]


def test_a_replica_that_starts_late_makes_its_first_requests_wait():
    outcomes = run_timeline(
        _answers([0.0, 0.0]), [0, 1], _timeline([_replica()], [_replica(LARGE, from_ns=9 * NS)], (0, 50.0))
    )
    assert outcomes.latency_s.min() > 9


def test_a_retired_replica_gets_no_request_and_another_one_takes_over():
    small = [_replica(until_ns=NS), _replica(from_ns=NS)]
    outcomes = run_timeline(_answers([90.0] * 4), [0, 1, NS, NS + 1], _timeline(small, [_replica(LARGE)], (0, 50.0)))
    assert outcomes.answered_by.tolist() == [0] * 4
    old, new = outcomes.busy_until_ns[0]
    assert 0 < old <= NS < new


def test_a_tier_without_a_replica_is_skipped():
    outcomes = run_timeline(_answers([90.0]), [0], _timeline([_replica(from_ns=NS)], [_replica(LARGE)], (0, 50.0)))
    assert outcomes.answered_by.tolist() == [1]


def test_a_request_that_no_replica_can_ever_answer_is_an_error():
    with pytest.raises(ValueError, match="no replica"):
        run_timeline(_answers([0.0]), [0], _timeline([], [], (0, 50.0)))


def test_a_move_keeps_what_both_plans_have_and_starts_the_rest_cold():
    now, then = [TierDeployment(((SMALL, 3),), (2.0,))], [TierDeployment(((SMALL, 1), (LARGE, 1)), (2.0, 1.0))]
    [replicas], done_ns = moved(now, then, at_ns=5, cost=MoveCost(drain_s=1, cold_start_s=2))
    assert done_ns == 5 + 3 * NS
    assert sorted((each.shape.cost.fixed, each.from_ns, each.until_ns) for each in replicas) == [
        (SMALL.cost.fixed, 0, 5),
        (SMALL.cost.fixed, 0, done_ns),
        (SMALL.cost.fixed, 0, FOREVER_NS),
        (LARGE.cost.fixed, done_ns, FOREVER_NS),
    ]


def test_a_wide_replica_waits_for_all_its_gpus():
    wide = engine(8.0, 2)
    now = [TierDeployment(((SMALL, 4),), (1.0,)), TierDeployment((), ())]
    then = [TierDeployment((), ()), TierDeployment(((wide, 2),), (1.0,))]
    (old, new), done_ns = moved(now, then, at_ns=0, cost=MoveCost(drain_s=1, cold_start_s=2))
    assert [each.until_ns // NS for each in old] == [0, 0, 3, 3]
    assert [each.from_ns // NS for each in new] == [3, 6]
    assert done_ns == 6 * NS


def test_all_replicas_that_fit_on_the_gpus_of_a_retired_one_start_together():
    wide = engine(8.0, 2)
    now = [TierDeployment(((SMALL, 1),), (1.0,)), TierDeployment(((wide, 2),), (1.0,))]
    then = [TierDeployment(((SMALL, 6),), (1.0,)), TierDeployment((), ())]
    (new, old), done_ns = moved(now, then, at_ns=0, cost=MoveCost(drain_s=1, cold_start_s=2))
    assert sorted(each.until_ns // NS for each in old) == [2, 5]
    assert sorted(each.from_ns // NS for each in new) == [0, 2, 5, 5, 8, 8]
    assert done_ns == 8 * NS


def test_an_answer_that_no_later_tier_can_better_is_delivered():
    outcomes = run_timeline(_answers([0.0]), [0], _timeline([_replica()], [], (0, 50.0)))
    assert outcomes.answered_by.tolist() == [0]


def test_thresholds_on_the_planned_replicas_are_as_good_as_the_plan():
    planner = CascadePlanner(problem())
    plan = planner.plan()
    assert plan is not None
    again = thresholds_for(planner, plan.deployments)
    assert again is not None
    assert again.meets
    assert again.p95_s <= plan.p95_s + 1e-9


def test_thresholds_avoid_tiers_without_replicas():
    planner = CascadePlanner(problem(quality_min=10.0))
    deployments = (TierDeployment(((SMALL, 4),), (1.0,)), TierDeployment((), ()), TierDeployment((), ()))
    found = thresholds_for(planner, deployments)
    assert found is not None
    assert found.routed.shares == (1.0, 0.0, 0.0)
    alone = simulated_under(planner, (REJECT_ALL, 0.0), deployments)
    assert alone is not None
    assert alone.routed.shares == (1.0, 0.0, 0.0)
    assert simulated_under(planner, (REJECT_ALL, 0.0), (TierDeployment((), ()),) * 3) is None


def test_the_present_plan_is_kept_while_traffic_stays_and_outdated_when_it_doubles():
    planner = CascadePlanner(problem())
    plan = planner.plan()
    assert plan is not None
    assert outdated(planner, plan) == ""
    assert replan(planner, plan.deployments, MoveCost()).move is None
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
    found = replan(planner, plan.deployments, MoveCost(), in_force=in_force)
    assert found.at_once is not None
    assert found.kept == (found.at_once.routed.thresholds == in_force)
    missed, misses = misses_quality(planner, now.routed), misses_quality(planner, found.at_once.routed)
    assert misses <= missed
    if not missed:
        assert found.at_once.p95_s <= now.p95_s
    again = replan(planner, plan.deployments, MoveCost(), in_force=found.at_once.routed.thresholds)
    assert again.kept


def test_thresholds_in_force_are_kept_where_others_only_raise_the_quality():
    planner = CascadePlanner(problem(quality_min=60.0))
    plan = planner.plan()
    assert plan is not None
    found = replan(planner, plan.deployments, MoveCost(), in_force=plan.routed.thresholds)
    assert found.kept
    assert found.at_once is not None
    assert found.at_once.routed.thresholds == plan.routed.thresholds


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


def test_replicas_move_only_where_the_horizon_pays_for_the_cold_start():
    planner = CascadePlanner(problem(rate=30.0, quality_min=80.0))
    poor = (
        TierDeployment(((engine(1.0), 1),), (1.0,)),
        TierDeployment(((engine(3.0), 1),), (1.0,)),
        TierDeployment(((engine(8.0, 2), 5),), (1.0,)),
    )
    long = replan(planner, poor, MoveCost(drain_s=1, cold_start_s=1, horizon_s=200))
    assert long.move is not None
    assert long.move_p95_s < 0.9 * long.keep_p95_s
    never = replan(planner, poor, MoveCost(drain_s=30, cold_start_s=90, horizon_s=100))
    assert never.at_once is not None
    assert never.move is None


def test_a_move_that_starves_a_tier_meanwhile_does_not_pay():
    planner = CascadePlanner(problem(rate=12.0, quality_min=80.0))
    plan = planner.plan()
    assert plan is not None
    tier = max(range(3), key=lambda index: plan.gpus[index])
    ((shape, count),) = plan.deployments[tier].replicas
    other = msgspec.structs.replace(shape, cost=shape.cost, pipeline=1, tensor=shape.tensor * 2)
    present = list(plan.deployments)
    present[tier] = TierDeployment(((other, count),), plan.deployments[tier].rates)  # as fast, but all must restart
    found = replan(planner, present, MoveCost(drain_s=30, cold_start_s=90, horizon_s=600))
    assert found.at_once is not None
    assert found.move is None
    assert "over 600 s" in found.reason


def test_with_a_latency_bound_replicas_move_for_quality():
    planner = CascadePlanner(problem(quality_min=None, latency_max_s=4.0))
    small = (
        TierDeployment(((engine(1.0), 10),), (1.0,)),
        TierDeployment(((engine(3.0), 1),), (1.0,)),
        TierDeployment(((engine(8.0, 2), 1),), (1.0,)),
    )
    found = replan(planner, small, MoveCost(drain_s=0, cold_start_s=1, horizon_s=300))
    assert found.at_once is not None
    assert found.move is not None
    assert found.move.routed.quality > found.at_once.routed.quality


def test_an_unmet_quality_is_reason_enough_to_move():
    planner = CascadePlanner(problem(sample=judged(seed=3)))
    only_small = (TierDeployment(((SMALL, 12),), (1.0,)), TierDeployment((), ()), TierDeployment((), ()))
    found = replan(planner, only_small, MoveCost())
    assert found.move is not None
    assert found.move.meets
    assert found.at_once is not None
    assert not found.at_once.meets
