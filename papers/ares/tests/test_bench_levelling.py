"""Fleets of decoding instances in figures: sequences are conserved, and rules level loads."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_time_models import LinearStepTime
from millrace.workloads.lengths import LogNormalLengths
from millrace.workloads.shape import RequestShape

from papers.ares.bench.levelling import Fleet, FleetOutcome, FleetShape, random_placement_cv, weighted_quantile

COST = LinearStepTime(fixed=10e6, per_context_token=70.0).cost(EngineParameters())
LENGTHS = LogNormalLengths(prompt_mean=200, output_mean=3_000, output_sigma=1.0)


def run(rule: str, *, count: int = 8, moves_max: int = 2) -> FleetOutcome:
    shape = FleetShape(count=count, rate_per_s=0.1, rule=rule, moves_max=moves_max, seconds=200)
    return Fleet(shape, COST, LENGTHS).run()


def test_the_same_seed_gives_the_same_outcome() -> None:
    assert run("ares") == run("ares")


def test_requests_run_for_as_long_as_their_steps_take() -> None:
    """0.1 requests/s, each of 1,000 tokens at 10.1 ms, which end with the eleventh second: Little's law."""

    class Even:
        def draw(self, rng: Random) -> RequestShape:
            return RequestShape(10, 1_000)

    shape = FleetShape(count=50, rate_per_s=0.1, seconds=400)
    outcome = Fleet(shape, COST, Even()).run()
    assert outcome.running == pytest.approx(0.1 * 11, rel=0.1)
    assert outcome.tpot_ms == pytest.approx(10.1, abs=0.1)


@pytest.mark.parametrize("rule", ["reactive", "ares"])
def test_a_rule_levels_loads(rule: str) -> None:
    none, levelled = run("none"), run(rule)
    assert none.moves_per_s == 0
    assert levelled.moves_per_s > 0
    assert levelled.variance < 0.5 * none.variance


def test_random_placement_is_predicted_by_its_formula() -> None:
    outcome = run("none", count=64)
    assert outcome.variance**0.5 / outcome.load == pytest.approx(random_placement_cv([outcome]), rel=0.25)


def test_a_weighted_quantile_counts_weights() -> None:
    values, weights = np.array([3.0, 1.0, 2.0]), np.array([1.0, 98.0, 1.0])
    assert [weighted_quantile(values, weights, share) for share in (0.5, 0.985, 1.0)] == [1.0, 2.0, 3.0]
