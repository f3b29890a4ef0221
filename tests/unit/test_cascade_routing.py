"""Thresholds on judged samples: who reaches which tier, the paper's example, bounds of quality."""

import math

import numpy as np
import pytest
from millrace.cascade.routing import initial_thresholds, route, routings, routings_near
from millrace.cascade.sample import JudgedSample


def sample(scores: list[list[float]], quality: list[list[float]]) -> JudgedSample:
    lengths = np.ones((len(quality), len(quality[0])), dtype=np.int64)
    return JudgedSample(
        scores=np.array(scores, dtype=float).reshape(len(quality), -1),
        quality=np.array(quality, dtype=float),
        prompt_tokens=lengths,
        output_tokens=lengths,
    )


THREE = sample([[90, 10], [50, 90], [50, 10], [20, 80]], [[90, 91, 92], [50, 85, 95], [40, 30, 70], [10, 60, 99]])


def test_an_answer_at_its_threshold_is_accepted_and_the_last_tier_is_never_judged() -> None:
    routed = route(THREE, (50, 90))
    assert routed.answered_by.tolist() == [0, 0, 0, 2]
    assert routed.shares == (1.0, 0.25, 0.25)
    assert routed.quality == (90 + 50 + 40 + 99) / 4
    with pytest.raises(ValueError, match="1 thresholds for 3 tiers"):
        route(THREE, (50,))


def test_an_entry_tier_skips_the_ones_before() -> None:
    routed = route(THREE, (90, 90), entry=np.array([0, 1, 2, 0]))
    assert routed.reached.tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]]
    assert routed.shares == (0.5, 0.5, 0.5)


def test_the_bound_of_quality_is_below_the_mean_and_nearer_with_more_requests() -> None:
    few = route(THREE, (50, 90))
    many = route(sample(THREE.scores.tolist() * 25, THREE.quality.tolist() * 25), (50, 90))
    assert few.quality_low < many.quality_low < many.quality == few.quality
    spread = np.std([90, 50, 40, 99], ddof=1)
    assert few.quality_low == pytest.approx(few.quality - 1.645 * spread / 2)


def test_the_first_thresholds_give_tier_i_the_ith_part() -> None:
    scores = np.random.default_rng(1).uniform(0, 100, (600, 2))
    drawn = sample(scores.tolist(), np.full((600, 3), 50.0).tolist())
    shares = route(drawn, initial_thresholds(drawn)).shares
    assert shares == pytest.approx((1, 1 / 2, 1 / 3), abs=0.01)


def test_every_distinct_routing_is_told_once_and_thinned() -> None:
    scores = np.random.default_rng(2).uniform(0, 100, (300, 2))
    drawn = sample(scores.tolist(), np.full((300, 3), 50.0).tolist())
    found = routings(drawn, most=10)
    sets = {(routed.reached.tobytes(), routed.answered_by.tobytes()) for routed in found}
    assert len(sets) == len(found) <= 121
    assert (1.0, 0.0, 0.0) in [routed.shares for routed in found]
    assert (1.0, 1.0, 1.0) in [routed.shares for routed in found]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"scores": np.zeros((4, 1))}, "scores has shape"),
        ({"scores": np.full((4, 2), math.nan)}, "scores holds values outside"),
        ({"quality": np.full((4, 3), 101.0)}, "quality holds values outside"),
        ({"output_tokens": np.zeros((4, 3), dtype=np.int64)}, "output_tokens holds a length below 1"),
        ({"prompt_tokens": np.ones((4, 2), dtype=np.int64)}, "prompt_tokens has shape"),
    ],
)
def test_a_malformed_sample_is_refused_by_field(change: dict[str, np.ndarray], told: str) -> None:
    fields = {name: getattr(THREE, name) for name in ("scores", "quality", "prompt_tokens", "output_tokens")}
    with pytest.raises(ValueError, match=told):
        JudgedSample(**{**fields, **change})


def test_tiers_that_are_passed_over_are_not_reached_and_the_last_one_asked_delivers():
    routed = route(THREE, (50, 90), tiers=(1,))
    assert routed.reached.sum(axis=0).tolist() == [0, THREE.count, 0]
    assert routed.answered_by.tolist() == [1] * THREE.count
    ends = route(THREE, (50, 90), tiers=(0, 2))
    assert not ends.reached[:, 1].any()
    assert set(ends.answered_by.tolist()) == {0, 2}
    with pytest.raises(ValueError, match="starts at tier 2"):
        route(THREE, (50, 90), entry=np.full(THREE.count, 2), tiers=(0, 1))


def test_thresholds_between_the_grids_neighbours_lie_closer_to_the_chosen_ones():
    rng = np.random.default_rng(4)
    drawn = sample(rng.uniform(0, 100, (300, 2)).tolist(), rng.uniform(0, 100, (300, 3)).tolist())
    coarse = routings(drawn, most=4)
    chosen = next(each for each in coarse if 0.2 < each.shares[1] < 0.8)
    near = routings_near(drawn, chosen, grid=4, most=6)
    gaps = sorted(abs(each.shares[1] - chosen.shares[1]) for each in near if each.shares[1] != chosen.shares[1])
    others = [abs(each.shares[1] - chosen.shares[1]) for each in coarse if each.shares[1] != chosen.shares[1]]
    assert gaps[0] < min(others)
