"""Confidence judges: features of log-probabilities, isotonic calibration, the bound of a running answer."""

import math
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace.judging.calibration import IsotonicCurve, area_under_curve, calibration_error, fit_isotonic
from millrace.judging.confidence import fit_confidence
from millrace.judging.evidence import ConfidenceFeature, RunningEvidence, feature_of


def test_features_of_an_answer() -> None:
    logprobs = [-0.1] * 18 + [-2.0, -4.0]
    assert feature_of(ConfidenceFeature.SUM, logprobs) == pytest.approx(-7.8)
    assert feature_of(ConfidenceFeature.LEAST, logprobs) == -4.0
    assert feature_of(ConfidenceFeature.LOW_MEAN, logprobs) == pytest.approx(-3.0)
    assert feature_of(ConfidenceFeature.MEAN, logprobs) == pytest.approx(-0.39)


@pytest.mark.parametrize("logprobs", [[], [math.nan], [-1.0, 0.5], [math.inf]])
def test_what_is_no_log_probability_is_no_evidence(logprobs: list[float]) -> None:
    assert feature_of(ConfidenceFeature.SUM, logprobs) is None


@given(st.lists(st.floats(-40, 0) | st.just(-math.inf), min_size=1, max_size=40), st.integers(0, 40))
def test_a_running_value_bounds_the_final_one(logprobs: list[float], cut: int) -> None:
    running = RunningEvidence()
    running.add(logprobs[:cut])
    for feature in (ConfidenceFeature.SUM, ConfidenceFeature.LEAST):
        bound, final = running.value(feature), feature_of(feature, logprobs)
        assert bound >= final - 1e-9
        assert cut < len(logprobs) or bound == pytest.approx(final)
    assert running.value(ConfidenceFeature.MEAN) is None


def test_isotonic_calibration_is_the_least_squares_rising_curve() -> None:
    curve = fit_isotonic(np.array([1.0, 2.0, 3.0, 4.0]), np.array([False, True, False, True]))
    assert curve.at(np.array([1.0, 2.0, 3.0, 4.0])) == pytest.approx([0.0, 0.5, 0.5, 1.0])


@given(st.lists(st.tuples(st.integers(0, 8), st.booleans()), min_size=1, max_size=60))
def test_calibration_rises_and_keeps_the_share_of_right_answers(pairs: list[tuple[int, bool]]) -> None:
    scores = np.array([float(score) for score, _ in pairs])
    right = np.array([each for _, each in pairs])
    fitted = fit_isotonic(scores, right).at(np.sort(scores))
    assert (np.diff(fitted) >= -1e-12).all()
    assert fitted.mean() == pytest.approx(right.mean())


def test_the_area_under_the_curve_counts_pairs() -> None:
    rng = Random(1)
    scores = np.array([rng.randint(0, 5) for _ in range(40)], dtype=float)
    right = np.array([rng.random() < 0.5 for _ in range(40)])
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[right] for b in scores[~right]]
    assert area_under_curve(scores, right) == pytest.approx(float(np.mean(pairs)))
    assert area_under_curve(scores, np.ones(40, dtype=bool)) == 0.5


def answers(seed: int, count: int = 400) -> tuple[list[list[float]], np.ndarray]:
    """Answers whose tokens are each right with their probability; an answer is right if all of them are."""
    rng = Random(seed)
    told, right = [], []
    for _ in range(count):
        probabilities = [rng.uniform(0.6, 1.0) for _ in range(rng.randint(1, 12))]
        told.append([math.log(each) for each in probabilities])
        right.append(all(rng.random() < each for each in probabilities))
    return told, np.array(right)


def test_the_sum_wins_where_an_answer_is_right_if_all_tokens_are() -> None:
    told, right = answers(1, 2000)
    model = fit_confidence("m", told, right)
    assert model.feature is ConfidenceFeature.SUM
    assert model.area > 0.75
    assert model.error < 0.05
    fresh, truth = answers(2, 2000)
    scores = np.array([model.score(each) for each in fresh])
    assert calibration_error(scores / 100, truth) < 0.06


def test_an_answer_below_the_least_value_of_a_score_does_not_reach_it() -> None:
    told, right = answers(3)
    model = fit_confidence("m", told, right)
    running = RunningEvidence()
    running.add(told[0])
    value, score = running.value(model.feature), model.score(told[0])
    for wanted in (score - 1.0, score + 1.0):
        least = model.least_value(wanted)
        assert (value >= least) == (wanted < score)


def test_no_judge_is_fitted_to_few_answers_or_to_answers_of_one_kind() -> None:
    told, right = answers(4)
    with pytest.raises(ValueError, match="needs 50 answers"):
        fit_confidence("m", told[:40], right[:40])
    with pytest.raises(ValueError, match="right and wrong"):
        fit_confidence("m", told, np.ones(len(told), dtype=bool))
    with pytest.raises(ValueError, match="no usable log-probabilities"):
        fit_confidence("m", [*told, [math.nan]], np.append(right, True))


@pytest.mark.parametrize(
    ("scores", "probabilities"),
    [((), ()), ((1.0, 1.0), (0.1, 0.2)), ((1.0, 2.0), (0.5, 0.4)), ((1.0,), (1.5,)), ((1.0, 2.0), (0.5,))],
)
def test_a_malformed_curve_is_refused(scores: tuple[float, ...], probabilities: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="isotonic curve"):
        IsotonicCurve(scores, probabilities)
