"""The paper's planner: its heuristic search, its objective, and plans through the core's slot."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from millrace.policies.stages import PlanningView, search
from millrace.policies.stages.objectives import candidate_edges
from millrace.policies.stages.statistics import statistics_of

from papers import PAPERS
from papers.cascadeinfer.equation1 import QualityModel, quality_costs
from papers.cascadeinfer.planning import PaperParameters, costs_of
from papers.cascadeinfer.search import chain, two_phase
from tests.unit.stage_cases import H200, decide, lognormal, partitions, table, view

CHAIN, TWO_PHASE = f"{PAPERS}/cascadeinfer/chain.py", f"{PAPERS}/cascadeinfer/two_phase.py"


def test_a_chain_is_the_best_one_with_one_instance_per_stage() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        cuts, instances = rng.randint(2, 6), rng.randint(1, 5)
        costs = table(rng, cuts, instances)
        found = chain(costs)
        assert found is not None
        if instances <= cuts:
            chains = [p for p in partitions(cuts, instances) if len(p) == instances]
            assert search.total(costs, found) == pytest.approx(min(search.total(costs, p) for p in chains))
        assert sum(d for _, _, d in found) == instances
        assert [i for i, _, _ in found[1:]] == [j for _, j, _ in found[:-1]]


def test_merging_stops_where_no_pair_gains_and_never_makes_it_worse_than_the_chain() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        costs = table(rng, rng.randint(2, 6), rng.randint(2, 5), holes=rng.choice([0.0, 0.2]))
        started, found = chain(costs), two_phase(costs)
        assert found is not None
        if started is not None:
            assert search.total(costs, found) <= search.total(costs, started) + 1e-12
        if not math.isfinite(search.total(costs, found)):
            continue  # no merge repairs it
        assert found in list(partitions(len(costs.edges) - 1, costs.instances))
        for a, b in itertools.pairwise(found):
            merged = costs.cost[a[0], b[1], a[2] + b[2]]
            assert merged >= costs.cost[a] + costs.cost[b] + costs.cut[b[0]] - 1e-12


def test_the_papers_objective_on_a_set_is_equation_one() -> None:
    prompts, outputs = lognormal(3)
    found = statistics_of(prompts, outputs, span_s=100.0)
    model = QualityModel(d0=6e-3, d1=9e-6, d2=1e-9, d3=1e-14, d4=30e-9)
    costs = quality_costs(found, model, candidate_edges(found), 8)
    n = costs.sequences[0, -1, 1]
    step = n / found.decode_tokens.sum()
    q = (
        model.d0
        + (
            model.d1 * n
            + step * model.d2 * found.prompt_tokens.sum()
            + step * model.d3 * found.prompt_tokens_squared.sum()
            + step * model.d4 * found.context_tokens.sum()
        )
        / 8
    )
    assert costs.cost[0, -1, 8] == pytest.approx(n * q)


def test_a_chain_has_one_instance_per_stage() -> None:
    decision = decide(CHAIN, view(25.0, 8))
    assert [shape.instances for shape in decision.shapes] == [1] * 8


@pytest.mark.parametrize("name", [CHAIN, TWO_PHASE])
def test_more_instances_than_tiers_still_give_a_plan(name: str) -> None:
    decision = decide(name, view(300.0, 200))
    assert sum(shape.instances for shape in decision.shapes) == 200


def test_exact_is_never_worse_than_the_heuristic_on_the_same_table() -> None:
    for rate in (5.0, 15.0, 30.0):
        costs = costs_of(view(rate), PaperParameters())
        best, heuristic = search.exact(costs), two_phase(costs)
        assert best is not None
        if heuristic is not None:
            assert search.total(costs, best) <= search.total(costs, heuristic) + 1e-12


def test_one_stage_wins_at_light_load_and_with_uniform_lengths() -> None:
    found = statistics_of([500] * 3000, [400] * 3000, span_s=15.0)
    for seen in (view(1.0), PlanningView(instances=16, statistics=found, instance=H200)):
        assert len(decide(TWO_PHASE, seen).shapes) == 1


@pytest.mark.parametrize("name", [CHAIN, TWO_PHASE])
def test_with_few_instances_it_is_one_stage_and_without_step_times_nothing_changes(name: str) -> None:
    assert len(decide(name, view(5.0, 3)).shapes) == 1
    current = decide(TWO_PHASE, view(25.0)).shapes
    for seen in (
        PlanningView(instances=16, instance=H200, current=current),
        PlanningView(instances=16, statistics=view(25.0).statistics, current=current),
    ):
        assert decide(name, seen).shapes == current
