"""A cascade whose thresholds change over time."""

from __future__ import annotations

import numpy as np
import pytest
from millrace.cascade.chain import NS
from millrace.cascade.sample import JudgedSample

from papers.cascadia.capacity import NO_REPLICAS, TierDeployment
from papers.cascadia.tests.test_planner import engine
from papers.cascadia.timeline import Timeline, run_timeline

SMALL, LARGE = (TierDeployment(((engine(factor), 1),), (1.0,)) for factor in (1.0, 8.0))


def _answers(scores: list[float]) -> JudgedSample:
    count = len(scores)
    return JudgedSample(
        scores=np.array([scores]).T,
        quality=np.column_stack([np.full(count, 40.0), np.full(count, 90.0)]),
        prompt_tokens=np.full((count, 2), 100),
        output_tokens=np.full((count, 2), 20),
    )


def _timeline(small: TierDeployment, large: TierDeployment, *changes: tuple[int, float]) -> Timeline:
    return Timeline(tiers=(small, large), thresholds=[(at, (value,)) for at, value in changes], judge_s=(0.0,))


def test_an_answer_is_judged_by_the_thresholds_in_force_when_it_is_there():
    outcomes = run_timeline(_answers([50.0, 50.0]), [0, 5 * NS], _timeline(SMALL, LARGE, (0, 40.0), (4 * NS, 60.0)))
    assert outcomes.answered_by.tolist() == [0, 1]
    assert outcomes.quality.tolist() == [40.0, 90.0]
    assert outcomes.latency_s[1] > outcomes.latency_s[0]


def test_a_tier_without_a_replica_is_skipped():
    outcomes = run_timeline(_answers([90.0]), [0], _timeline(NO_REPLICAS, LARGE, (0, 50.0)))
    assert outcomes.answered_by.tolist() == [1]


def test_an_answer_that_no_later_tier_can_better_is_delivered():
    outcomes = run_timeline(_answers([0.0]), [0], _timeline(SMALL, NO_REPLICAS, (0, 50.0)))
    assert outcomes.answered_by.tolist() == [0]


def test_a_request_that_no_replica_can_ever_answer_is_an_error():
    with pytest.raises(ValueError, match="no tier has a replica"):
        run_timeline(_answers([0.0]), [0], _timeline(NO_REPLICAS, NO_REPLICAS, (0, 50.0)))
