"""The published loop and its objectives."""

import pytest

from papers.cascadia.objective import latency_quality_score, quality_latency_score
from papers.cascadia.planner import CascadePlanner
from papers.cascadia.published_loop import plan_as_published
from papers.cascadia.tests.test_planner import problem


def test_the_papers_example_of_the_objective():
    def score(latency_s: float, quality: float) -> float:
        return latency_quality_score(latency_s, quality, quality_min=0.90, utopia=0.95, nadir=0.75, weight=100)

    assert score(11.0, 0.88) == pytest.approx(21.0)
    assert score(11.4, 0.91) == pytest.approx(11.4)
    assert score(12.2, 0.93) == pytest.approx(12.2)


def test_a_largest_model_that_is_not_the_best_does_not_flip_the_objective():
    for utopia in (0.75, 0.70):
        worse = latency_quality_score(1.0, 0.5, quality_min=0.9, utopia=utopia, nadir=0.75, weight=10)
        better = latency_quality_score(1.0, 0.8, quality_min=0.9, utopia=utopia, nadir=0.75, weight=10)
        assert 1.0 < better < worse


def test_the_latency_constrained_objective_prefers_quality_within_the_budget():
    def score(latency_s: float, quality: float) -> float:
        return quality_latency_score(latency_s, quality, latency_max_s=10, slowest_s=20, fastest_s=2, weight=100)

    assert score(9, 80) < score(5, 70)
    assert score(19, 99) == pytest.approx(-99 + 100 * 9 / 18)


def test_the_published_loop_ends_and_is_not_better_than_the_exact_plan_by_its_own_objective() -> None:
    asked = problem(use_confidence=False)
    planner = CascadePlanner(asked)
    published = plan_as_published(planner)
    assert published is not None
    fitting = [design for design in planner.front() if design.routed.quality >= 80]
    assert published.routed.quality < 80 or min(d.tier_latency_s for d in fitting) <= published.tier_latency_s * 1.0001
