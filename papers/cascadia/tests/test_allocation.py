"""Allocation of GPUs to tiers: the bisection, the MILP and brute force agree; mixtures of shapes are all covered."""

from __future__ import annotations

import itertools
import math
from random import Random

import pytest
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_cost import StepCost

from papers.cascadia.allocation import Allocation, bisect_allocation, latency_table, milp_allocation
from papers.cascadia.capacity import TierCapacity, allocate
from papers.cascadia.replicas import RateCurve, ReplicaShape


def random_table(rng: Random, gpus: int) -> list[float]:
    work, least, base = rng.uniform(20, 400), rng.choice([1, 1, 2, 4]), rng.uniform(0.1, 2)
    return [math.inf] * least + [work / count * rng.uniform(0.8, 1.2) + base for count in range(least, gpus + 1)]


def brute_force(tables: list[list[float]], gpus: int) -> float:
    choices = itertools.product(*(range(gpus + 1) for _ in tables))
    return min(
        (
            max(table[count] for table, count in zip(tables, counts, strict=True))
            for counts in choices
            if sum(counts) <= gpus
        ),
        default=math.inf,
    )


@pytest.mark.parametrize("seed", range(12))
def test_bisection_equals_brute_force(seed: int) -> None:
    rng = Random(seed)
    gpus = rng.randint(3, 12)
    tables = [random_table(rng, gpus) for _ in range(3)]
    found = bisect_allocation(tables, gpus)
    best = brute_force(tables, gpus)
    assert (found.latency_s if found is not None else math.inf) == best
    if found is not None:
        assert sum(found.gpus) <= gpus


@pytest.mark.parametrize(("seed", "gpus"), [(0, 16), (1, 32), (2, 48)])
def test_the_milp_finds_the_same_latency(seed: int, gpus: int) -> None:
    rng = Random(seed)
    tables = [random_table(rng, gpus) for _ in range(3)]
    bisected, solved = bisect_allocation(tables, gpus), milp_allocation(tables, gpus)
    assert bisected is not None
    assert solved is not None
    assert solved.latency_s == pytest.approx(bisected.latency_s, rel=1e-6)
    assert sum(solved.gpus) <= gpus


def test_a_tier_that_nobody_reaches_gets_no_gpu() -> None:
    tables = [[math.inf, 4.0, 2.0], [0.0, 0.0, 0.0]]
    assert bisect_allocation(tables, 2) == Allocation((2, 0), 2.0)
    solved = milp_allocation(tables, 2)
    assert solved is not None
    assert solved.latency_s == pytest.approx(2.0)


def test_too_few_gpus_are_no_allocation() -> None:
    tables = [[math.inf, 1.0], [math.inf, 1.0]]
    assert bisect_allocation(tables, 1) is None
    assert milp_allocation(tables, 1) is None
    assert milp_allocation([[math.inf, math.inf]], 1) is None


def shape(tensor: int) -> ReplicaShape:
    return ReplicaShape(tensor=tensor, cost=StepCost(fixed=1), parameters=EngineParameters())


def tier(rate: float, *curves: tuple[int, float]) -> TierCapacity:
    """A tier whose shapes of so many GPUs serve so many requests/s within 1 s, ten times as many within 10 s."""
    return TierCapacity(
        [(shape(gpus), RateCurve((most / 10, most, most * 10), (0.5, 1.0, 10.0))) for gpus, most in curves], rate
    )


def test_capacity_is_the_best_of_all_mixtures_of_replicas() -> None:
    rng = Random(7)
    for _ in range(50):
        curves = [(gpus, rng.uniform(1, 4) * gpus ** rng.uniform(0.7, 1.2)) for gpus in (1, 2, 4)]
        mixed = tier(1.0, *curves)
        for gpus in range(1, 12):
            counts = itertools.product(*(range(gpus // size + 1) for size, _ in curves))
            best = max(
                sum(count * most for count, (_, most) in zip(each, curves, strict=True))
                for each in counts
                if sum(count * size for count, (size, _) in zip(each, curves, strict=True)) <= gpus
            )
            assert mixed.capacities(1.0, gpus)[gpus] == pytest.approx(best)
            deployment = mixed.deployment(1.0, gpus)
            served = sum(count * rate for (_, count), rate in zip(deployment.replicas, deployment.rates, strict=True))
            assert served == pytest.approx(best)
            assert deployment.gpus <= gpus


def test_allocation_by_capacity_equals_allocation_by_tables() -> None:
    rng = Random(3)
    for _ in range(10):
        tiers = [tier(rng.uniform(2, 20), (1, rng.uniform(1, 3)), (2, rng.uniform(2, 8))) for _ in range(2)]
        found = allocate(tiers, 12, longest_s=10.0)
        by_table = bisect_allocation([latency_table(each, 12) for each in tiers], 12)
        if found is None:
            assert by_table is None
        else:
            assert by_table is not None
            assert found[1] == pytest.approx(by_table.latency_s, rel=1e-6)


def test_a_tier_beyond_its_highest_simulated_rate_is_not_served() -> None:
    assert tier(25.0, (1, 1.0)).need(10.0, 2) is None
    assert allocate([tier(25.0, (1, 1.0))], 2, longest_s=10.0) is None
    assert latency_table(tier(0.0), 2) == [0.0, 0.0, 0.0]
