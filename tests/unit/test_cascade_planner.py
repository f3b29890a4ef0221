"""Thresholds planned for the instances of a cascade: the whole chain, what is kept, what is changed."""

from dataclasses import replace
from itertools import accumulate
from random import Random

import msgspec
import pytest
from millrace.actor.engine import EngineSequence
from millrace.cascade.chain import ChainLoad, chain_latencies
from millrace.cascade.routing import REJECT_ALL, route
from millrace.cascade.thresholds import ThresholdDesign, ThresholdPlanner, ThresholdProblem
from millrace.contracts.worker import Sampling
from millrace.enginemodel.engine import ModelledEngine
from millrace.enginemodel.forecast.question import ReplicaRequest
from millrace.enginemodel.forecast.replica import simulate_replica
from millrace.enginemodel.step_cost import StepCost

from tests.unit.cascade_cases import COST, PARAMETERS, judged, tiers


def problem(**changes: object) -> ThresholdProblem:
    fields = {"rate": 8.0, "judge_s": (0.05, 0.05), "quality_min": 80.0, "thresholds_most": 4}
    return ThresholdProblem(**{"sample": judged(), **fields, **changes})


def planner(**changes: object) -> ThresholdPlanner:
    return ThresholdPlanner(problem(**changes), tiers(2, 3, 6))


def chosen(one: ThresholdPlanner) -> ThresholdDesign:
    return one.choose().design


@pytest.mark.parametrize("seed", range(6))
def test_a_replica_is_the_modelled_engine(seed: int) -> None:
    rng = Random(seed)
    parameters = msgspec.structs.replace(
        PARAMETERS,
        max_model_len=1024,
        blocks_total=rng.choice([64, 100, 400]),
        max_sequences=rng.choice([4, 64]),
        token_budget=rng.choice([128, 2048]),
        prefix_caching=False,
    )
    times = accumulate(int(rng.expovariate(30) * 1e9) for _ in range(60))
    arrivals = [ReplicaRequest(at_ns, rng.randint(1, 900), rng.randint(1, 90)) for at_ns in times]
    engine = ModelledEngine(parameters, COST)
    coming, now_ns, ends = list(enumerate(arrivals)), 0, {}
    while coming or engine.scheduler.has_work():
        if not engine.scheduler.has_work():
            now_ns = max(now_ns, coming[0][1].at_ns)
        while coming and coming[0][1].at_ns <= now_ns:
            index, each = coming.pop(0)
            sampling = Sampling(max_tokens=each.output_tokens, ignore_eos=True)
            prompt = [97] * each.prompt_tokens
            assert engine.add(EngineSequence(sequence=f"{index}.0", prompt_token_ids=prompt, sampling=sampling)) is None
        done = engine.step(now_ns)
        now_ns += done[1]
        ends |= {output.sequence: now_ns for output in done[0].outputs}
    served = simulate_replica(arrivals, COST.cost(parameters), parameters)
    assert [each.end_ns for each in served] == pytest.approx([ends[f"{i}.0"] for i in range(len(arrivals))], abs=2)


def test_a_request_that_the_engine_would_refuse_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit in max_model_len"):
        simulate_replica([ReplicaRequest(0, 4000, 97)], StepCost(fixed=1), PARAMETERS)
    with pytest.raises(ValueError, match="out of order"):
        simulate_replica([ReplicaRequest(5, 1, 1), ReplicaRequest(4, 1, 1)], StepCost(fixed=1), PARAMETERS)


def test_an_escalated_request_pays_every_tier_and_the_judge() -> None:
    load = ChainLoad(rate=0.5, judge_s=(1.0, 2.0), requests=50)
    costs = {
        name: chain_latencies(judged(), route(judged(), thresholds), tiers(4, 4, 4), load)
        for name, thresholds in (("first", (0, 0)), ("second", (REJECT_ALL, 0)), ("third", (REJECT_ALL, REJECT_ALL)))
    }
    assert (costs["second"] - costs["first"]).min() > 2.0  # an accepted answer has waited for its score as well
    assert (costs["third"] > costs["second"]).all()
    with pytest.raises(ValueError, match="tier 2 is reached by 50 requests and has no instance"):
        chain_latencies(judged(), route(judged(), (REJECT_ALL, REJECT_ALL)), tiers(4, 4, 0), load)


def test_thresholds_keep_the_quality_by_its_lower_bound_and_no_simulated_ones_that_do_are_faster() -> None:
    best = chosen(planner())
    assert best.meets
    assert best.routed.quality_low >= 80
    others = planner().designs()
    assert len(others) > 10
    assert all(best.p95_s <= each.p95_s for each in others if each.routed.quality_low >= 80)


def test_a_latency_bound_gives_the_best_quality_within_it() -> None:
    slow, fast = (chosen(planner(quality_min=None, latency_max_s=bound)) for bound in (60.0, 3.0))
    assert slow.p95_s <= 60
    assert slow.routed.quality_low >= fast.routed.quality_low


def test_a_tier_without_instances_is_passed_over_and_none_at_all_is_no_plan() -> None:
    without = ThresholdPlanner(problem(), tiers(2, 0, 6))
    assert chosen(without).routed.shares[1] == 0
    nothing = ThresholdPlanner(problem(), tiers(0, 0, 0))
    assert nothing.choose((50.0, 50.0)).design is None
    assert nothing.outdated((50.0, 50.0)) == "no tier has an instance"


def test_the_present_plan_is_kept_while_traffic_stays_and_outdated_when_it_changes() -> None:
    plan = chosen(planner())
    in_force = plan.routed.thresholds
    assert planner().outdated(in_force, plan.p95_s) == ""
    assert "p95" in planner(rate=300.0).outdated(in_force, plan.p95_s)
    assert planner(rate=300.0).outdated(in_force) == "", "what was expected is not known"
    assert "quality" in planner(quality_min=99.0).outdated(in_force, plan.p95_s)


@pytest.mark.parametrize(("seed", "threshold"), [(0, 10.0), (1, 70.0), (2, 95.0)])
def test_thresholds_in_force_give_way_only_to_better_ones(seed: int, threshold: float) -> None:
    one = planner(sample=judged(seed=seed), rate=12.0)
    in_force = (threshold, threshold)
    now, found = one.under(in_force), one.choose(in_force)
    assert found.kept == (found.design.routed.thresholds == in_force)
    missed, misses = (one.problem.misses_quality(each.routed) for each in (now, found.design))
    assert misses <= missed
    if not missed:
        assert found.design.p95_s <= now.p95_s
    assert one.choose(found.design.routed.thresholds).kept


def test_a_shortfall_that_the_sample_explains_is_no_miss() -> None:
    by_mean = problem(sample=judged(seed=1), use_confidence=False)
    routed = chosen(ThresholdPlanner(by_mean, tiers(2, 3, 6))).routed
    half_a_bound = routed.quality + (routed.quality - routed.quality_low) / 2
    assert not replace(by_mean, quality_min=half_a_bound).misses_quality(routed)
    assert replace(by_mean, quality_min=half_a_bound, use_confidence=True).misses_quality(routed)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"latency_max_s": 3.0}, "one of quality_min and latency_max_s"),
        ({"quality_min": None}, "one of quality_min and latency_max_s"),
        ({"rate": 0.0}, "rate must be positive"),
        ({"judge_s": (0.1,)}, "judge_s needs an entry per tier"),
    ],
)
def test_a_contradictory_problem_is_refused(change: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        problem(**change)
