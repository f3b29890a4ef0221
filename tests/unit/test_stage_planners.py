"""Stage planners: exact search against brute force, the objective, constraints, and when one stage wins."""

import math
import random

import msgspec
import numpy as np
import pytest
from millrace.contracts.status import BatchComposition
from millrace.enginemodel.coefficients import load_step_time
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_cost import StepCost
from millrace.policies.stages import STAGE_POLICIES, PlanningView, search
from millrace.policies.stages.deciding import apportion
from millrace.policies.stages.instance import InstanceModel, linear_instance
from millrace.policies.stages.membership import StageShape
from millrace.policies.stages.objectives import Constraints, StageCosts, candidate_edges, fair, open_costs
from millrace.policies.stages.statistics import BINS, EDGES, statistics_of

from tests.unit.stage_cases import H200, decide, partitions, statistics, table, view


def test_exact_equals_brute_force_over_a_thousand_seeds() -> None:
    infeasible = 0
    for seed in range(1000):
        rng = random.Random(seed)
        cuts, instances = rng.randint(1, 6), rng.randint(1, 5)
        costs = table(rng, cuts, instances, holes=rng.choice([0.0, 0.3, 0.7]))
        best = min(search.total(costs, parts) for parts in partitions(cuts, instances))
        found = search.exact(costs)
        if found is None:
            infeasible += 1
            assert best == math.inf
            continue
        assert search.total(costs, found) == pytest.approx(best)
        assert found in list(partitions(cuts, instances))
    assert 0 < infeasible < 500


# statistics


def test_statistics_count_every_token_once() -> None:
    prompts, outputs = [10, 500, 500, 7], [100, 1, 40_000, 0]
    found = statistics_of(prompts, outputs, span_s=2.0, cached=[0, 100, 500, 0])
    assert found.requests == 3
    assert found.decode_tokens.sum() == pytest.approx(40_101)
    assert found.weight.sum() == pytest.approx(3)
    assert found.prefill_tokens.sum() == 10 + 400
    assert found.context_tokens.sum() == pytest.approx(
        sum(o * (p + o / 2) for p, o in zip(prompts, outputs, strict=True))
    )
    assert found.prompt_tokens.sum() == pytest.approx(10 * 100 + 500 * 40_001)
    assert found.paths.sum() == 3
    assert found.requests_per_s == 1.5


def test_crossings_are_those_that_begin_below_and_end_above() -> None:
    found = statistics_of([10, 100, 100, 5000], [50, 50, 50_000, 10], span_s=1.0)
    edge = EDGES.index(1024)
    assert found.crossing(edge) == 1
    assert found.crossing(EDGES.index(32)) == 1


# objectives


def test_the_open_objective_is_littles_law() -> None:
    found = statistics(30.0)
    costs = open_costs(found, H200, candidate_edges(found), 16, Constraints())
    t, n, context = costs.pace_s[0, -1, 16], costs.sequences[0, -1, 16], costs.context[0, -1]
    decoded = found.decode_tokens.sum() / found.span_s / 16
    prefill = (found.prefill_tokens.sum() * H200.per_prefill_token_s + found.prefill_work.sum() * 0.9152e-9) / 16
    assert n == pytest.approx(decoded * t)
    step = H200.fixed_s + (H200.per_decode_s + H200.per_context_token_s * context) * (1 + n)
    assert t == pytest.approx(step / (1 - prefill / found.span_s), rel=1e-3)


def costs_at_25(model: InstanceModel = H200, **constraints: float) -> StageCosts:
    found = statistics(25.0)
    return open_costs(found, model, candidate_edges(found), 16, Constraints(**constraints))


def test_a_stage_holds_its_sequences_in_memory() -> None:
    tight = costs_at_25(msgspec.structs.replace(H200, kv_tokens=100_000.0), kv_used_max=0.5)
    held = np.where(np.isfinite(tight.sequences), tight.sequences, 0.0) * tight.context[:, :, None]
    assert np.isfinite(costs_at_25().cost[0, -1, 16])
    assert not np.isfinite(tight.cost[held > 50_000]).any()
    assert np.isfinite(tight.cost).any()


def test_transfers_into_and_out_of_a_stage_fit_its_slots() -> None:
    slow, found = msgspec.structs.replace(H200, copy_overhead_s=3.0), statistics(25.0)
    costs = costs_at_25(slow)
    assert np.isfinite(costs.cost[0, -1, 16])  # one stage moves nothing
    middle = len(costs.edges) // 2
    moves = found.crossing(costs.edges[middle]) / found.span_s
    few = int(moves * slow.copy_s(EDGES[costs.edges[middle]]) / 0.7 / 3)
    assert few >= 1
    assert not np.isfinite(costs.cost[0, middle, few])


def test_a_tail_makes_uneven_stages_slower_than_even_ones() -> None:
    plain, tailed = costs_at_25(), costs_at_25(msgspec.structs.replace(H200, tail_s=100e-9))
    stages = np.isfinite(tailed.cost) & (tailed.cost > 0)
    slower = np.divide(tailed.pace_s, plain.pace_s, out=np.ones_like(plain.pace_s), where=stages)
    assert slower[0, -1, 16] > 1.1
    middle = len(plain.edges) // 2
    assert slower[middle, middle + 1, 4] < slower[0, -1, 16]


def test_the_slowest_stage_keeps_to_the_fairness_bound() -> None:
    costs = costs_at_25()
    for slowdown in (0.0, 0.2, 0.5):
        parts = search.exact(fair(costs, slowdown))
        paces = [costs.pace_s[part] for part in parts]
        assert max(paces) <= (1 + slowdown) * costs.pace_s[0, -1, 16] * (1 + 1e-6)


# policies


def test_exact_splits_heavy_tails_under_load_and_says_what_it_expects() -> None:
    decision = decide("exact", view(25.0))
    assert len(decision.shapes) > 1
    assert sum(shape.instances for shape in decision.shapes) == 16
    assert decision.expects.cost < 0.95 * decision.expects.one_stage_cost
    assert len(decision.expects.stages) == len(decision.shapes)
    assert decision.expects.stages[0].moves_per_s == 0
    assert decision.expects.stages[1].moves_per_s > 0
    assert sum(s.arrivals_per_s for s in decision.expects.stages) == pytest.approx(25.0)
    assert "better than one stage" in decision.reason


@pytest.mark.parametrize(("rate", "instances"), [(1.0, 16), (5.0, 1), (5.0, 2), (5.0, 3), (5000.0, 16)])
def test_one_stage_wins_at_light_load_with_few_instances_and_in_saturation(rate: float, instances: int) -> None:
    decision = decide("exact", view(rate, instances))
    assert len(decision.shapes) == 1
    assert ("constraints" in decision.reason) == (rate == 5000.0)


def test_without_statistics_or_step_times_nothing_changes() -> None:
    current = decide("exact", view(25.0)).shapes
    for seen in (
        PlanningView(instances=16, instance=H200, current=current),
        PlanningView(instances=16, statistics=statistics_of([5], [5], span_s=1.0), instance=H200, current=current),
        PlanningView(instances=16, statistics=statistics(25.0), current=current),
    ):
        assert decide("exact", seen).shapes == current
    assert len(decide("exact", PlanningView(instances=16)).shapes) == 1


def test_a_layout_in_force_stays_until_another_is_better_by_the_margin() -> None:
    seen = view(25.0)
    first = decide("exact", seen)
    again = decide("exact", PlanningView(**{**vars(seen), "current": first.shapes}))
    assert again.shapes == first.shapes
    drifted = decide("exact", PlanningView(**{**vars(view(25.0, seed=5)), "current": first.shapes}))
    assert drifted.shapes == first.shapes  # another sample of the same lengths
    moved = decide("exact", PlanningView(**{**vars(view(9.0, median=6000.0, sigma=0.5)), "current": first.shapes}))
    assert moved.shapes != first.shapes


def test_a_layout_that_is_worse_than_one_stage_is_given_up_without_a_margin() -> None:
    staged = decide("exact", view(25.0)).shapes
    found = statistics_of([500] * 3000, [400] * 3000, span_s=15.0)
    decision = decide("exact", PlanningView(instances=16, statistics=found, instance=H200, current=staged))
    assert len(decision.shapes) == 1


def test_instances_are_shared_in_proportion_and_each_stage_gets_one() -> None:
    assert apportion([4, 2, 1], 14) == [8, 4, 2]
    assert apportion([100, 1, 1], 3) == [1, 1, 1]
    assert sum(apportion([7, 5, 3], 11)) == 11


@pytest.mark.parametrize(
    ("ranges", "named"),
    [
        ([{"length_min": 5}], r"ranges\[0\].length_min is 5"),
        ([{"length_min": 0, "length_max": 10}], "ranges end at 10"),
        ([{"length_min": 0, "length_max": 10}, {"length_min": 20}], r"ranges\[1\].length_min is 20"),
        ([{"length_min": 0, "length_max": 10}, {"length_min": 5}], r"ranges\[1\].length_min is 5"),
        ([{"length_min": 0, "length_max": 0}, {"length_min": 0}], r"ranges\[0\].length_max 0"),
        ([{"length_min": 0, "instances": 0}], r"ranges\[0\].instances"),
        ([], "ranges end at 0"),
    ],
)
def test_fixed_ranges_that_do_not_tile_are_refused(ranges: list[dict[str, int]], named: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=named):
        msgspec.convert({"ranges": ranges}, STAGE_POLICIES.load("fixed").parameters)


# step costs made linear


@pytest.mark.parametrize("name", ["h200-llama-3-8b", "cpu-8m"])
def test_a_published_step_time_becomes_a_linear_instance(name: str) -> None:
    cost = load_step_time(name).cost(EngineParameters())
    made = linear_instance(cost, kv_tokens=100_000, max_sequences=256)
    for decodes, context in ((4, 500), (32, 1000), (64, 1500)):
        said = made.fixed_s + decodes * (made.per_decode_s + context * made.per_context_token_s)
        batch = BatchComposition(decodes=decodes, context_tokens=decodes * context, longest_context=context)
        assert said == pytest.approx(cost.duration_fs(batch) / 1e15, rel=0.35)
    assert made.fixed_s > 0
    assert made.per_prefill_token_s + made.per_prefill_work_s > 0


@pytest.mark.parametrize("name", ["h200-llama-3-8b", "a100-llama-3-8b"])
@pytest.mark.parametrize("tokens", [512, 32_768])
def test_a_linear_instance_prices_long_prompts_too(name: str, tokens: int) -> None:
    # A line through prompts of up to 2,048 tokens made one of 12,000 tokens 2.5 times as long as it is.
    cost = load_step_time(name).cost(EngineParameters(max_model_len=65_536, blocks_total=8_192))
    made = linear_instance(cost, kv_tokens=100_000, max_sequences=256)
    linear_s = made.per_prefill_token_s * tokens + made.per_prefill_work_s * tokens**2 / 2
    assert linear_s == pytest.approx(chunks_s(cost, 8, tokens, budget=8 + tokens), rel=0.35)


@pytest.mark.parametrize("name", ["h200-llama-3-8b", "a100-llama-3-8b"])
@pytest.mark.parametrize(("decodes", "tokens"), [(16, 30_000), (64, 1_200), (128, 8_192)])
def test_curves_price_prompts_beside_decodes_chunk_by_chunk(name: str, decodes: int, tokens: int) -> None:
    # A line understated prompts of 1,200 tokens beside 64 decodes by 17 percent.
    cost = load_step_time(name).cost(EngineParameters(max_model_len=65_536, blocks_total=8_192))
    made = linear_instance(cost, kv_tokens=900_000, max_sequences=256, token_budget=4_096)
    said = float(made.step_curves().prompt(decodes, np.array([float(tokens)]))[0]) * tokens
    assert said == pytest.approx(chunks_s(cost, decodes, tokens, budget=4_096), rel=0.03)


def chunks_s(cost: StepCost, decodes: int, tokens: int, *, budget: int) -> float:
    """Seconds that a prompt adds to the steps that compute it, beside so many decodes."""
    alone = BatchComposition(decodes=decodes, context_tokens=decodes * 1024, longest_context=1024)
    real_fs, done = 0, 0
    while done < tokens:
        chunk = min(budget - decodes, tokens - done)
        beside = BatchComposition(
            decodes=decodes,
            prefills=1,
            prefill_tokens=chunk,
            context_tokens=decodes * 1024 + done + chunk,
            prefill_work=chunk * (done + chunk / 2),
            prefill_context_tokens=done + chunk,
            longest_context=1024,
        )
        real_fs += cost.duration_fs(beside) - cost.duration_fs(alone)
        done += chunk
    return real_fs / 1e15


@pytest.mark.parametrize("budget", [1, 96, 2_048])
def test_an_instance_is_sampled_in_steps_that_a_coordinator_has_time_for(budget: int) -> None:
    # With a budget of 96 tokens it was 2.7 million, for seconds in which the coordinator answered nobody.
    cost = CountingCost(fixed=10**9, decode=10**6, prefill_token=10**7)
    made = linear_instance(cost, kv_tokens=900_000, max_sequences=256, token_budget=budget)
    curves = made.step_curves()
    assert len(curves.beside) == len(curves.token_s) >= 2
    assert list(curves.beside) == sorted(set(curves.beside))
    assert cost.asked[0] <= (80_000 if budget >= 16 else 300_000)


class CountingCost(StepCost, frozen=True, kw_only=True):
    asked: list[int] = msgspec.field(default_factory=lambda: [0])

    def duration_fs(self, batch: BatchComposition) -> int:
        self.asked[0] += 1
        return super().duration_fs(batch)


def test_prompts_that_begin_elsewhere_cost_a_stage_nothing() -> None:
    # All prompts are short: the stage above a cut computes none of them, whatever arrives.
    found = statistics_of([100] * 200, [3_000] * 200, span_s=10.0)
    edges = (0, EDGES.index(1024), BINS)
    costs = open_costs(found, H200, edges, 8, Constraints())
    dear = open_costs(found, msgspec.structs.replace(H200, per_prefill_token_s=50e-6), edges, 8, Constraints())
    assert costs.pace_s[1, 2, 4] == dear.pace_s[1, 2, 4]
    assert costs.pace_s[0, 1, 4] < dear.pace_s[0, 1, 4]


def test_where_no_layout_keeps_the_constraints_the_one_in_force_stays() -> None:
    current = (
        StageShape(length_min=0, length_max=1024, instances=8),
        StageShape(length_min=1024, length_max=None, instances=8),
    )
    seen = PlanningView(instances=16, statistics=statistics(500.0), instance=H200, current=current)
    assert decide("exact", seen).shapes == current
