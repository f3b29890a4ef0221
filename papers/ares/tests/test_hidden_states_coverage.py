"""Estimates of an engine are judged by outcomes, and their p90 is moved until it covers what it should."""

import numpy as np
import pytest
from millrace.lengths.coverage import (
    FACTOR_MAX,
    FACTOR_MIN,
    JUDGED_HIGH_MIN,
    JUDGED_MIN,
    Coverage,
    JudgedEstimates,
    P90Correction,
)


def told(known: JudgedEstimates, *, name: str = "r", at: int = 290, p50: int = 50, p90: int = 80, left: int = 50_000):
    return known.told(name, at=at, p50=p50, p90=p90, left=left)


def lived(known: JudgedEstimates, count: int, *, length: int, p90: int) -> None:
    for index in range(count):
        name = f"s{index}.{length}"
        told(known, name=name, at=10, p50=5, p90=p90)
        known.left(name, length, ended=True)


def test_an_estimate_is_told_as_it_is_before_anything_has_ended() -> None:
    assert told(JudgedEstimates()) == (340, 370)


def test_an_engine_whose_p90_covers_too_little_is_not_believed_until_it_covers_again() -> None:
    known = JudgedEstimates()
    lived(known, JUDGED_MIN, length=500, p90=20)
    assert "p90 covers 0%" in known.coverage.refusal
    assert told(known) is None
    for _ in range(400):
        lived(known, 9, length=25, p90=20)
        lived(known, 1, length=35, p90=20)
    assert known.coverage.share == pytest.approx(9 * 15 / (9 * 15 + 25), abs=0.03), "every token weighs the same"
    assert told(known) is not None


def test_a_p90_that_covers_everything_is_none_either() -> None:
    coverage = Coverage()
    for _ in range(JUDGED_HIGH_MIN - 1):
        coverage.judge(1, within=True)
    assert not coverage.refusal
    coverage.judge(1, within=True)
    assert "100%" in coverage.refusal


@pytest.mark.parametrize(("p90", "covered"), [(190, 0.925), (157, 0.85)])
def test_a_p90_that_covers_a_little_too_much_or_too_little_is_moved_until_it_covers_90_percent(
    p90: int, covered: float
) -> None:
    rng, known = np.random.default_rng(5), JudgedEstimates()
    lengths = 10 + np.exp(rng.normal(4.0, 0.6, 6_000)).astype(int)  # e^4 = 55 tokens still to come
    told_p90 = []
    for index, length in enumerate(lengths.tolist()):
        said = told(known, name=f"s{index}", at=10, p50=55, p90=p90 - 10)
        assert said is not None
        assert said[0] == 65, "the median is not touched"
        told_p90.append(said[1])
        known.left(f"s{index}", length, ended=True)
    after, tokens = slice(2_000, None), lengths - 10  # every token weighs the same
    assert np.average(lengths <= p90, weights=tokens) == pytest.approx(covered, abs=0.02)
    within = lengths <= np.array(told_p90)
    assert np.average(within[after], weights=tokens[after]) == pytest.approx(0.9, abs=0.015)


def test_the_correction_is_bounded_and_stands_still_while_the_engine_is_not_believed() -> None:
    known = JudgedEstimates()
    lived(known, 400, length=500, p90=20)
    assert known.coverage.refusal
    before = known.correction.factor
    assert 1 < before < FACTOR_MAX
    lived(known, 100, length=500, p90=20)
    assert known.correction.factor == before
    for within, bound in ((True, FACTOR_MIN), (False, FACTOR_MAX)):
        correction = P90Correction()
        for _ in range(2_000):
            correction.judge(50, within=within)
        assert correction.factor == pytest.approx(bound)
        assert correction.moved(50, 50) == 50
        assert 50 <= correction.moved(50, 80) <= 400


def test_a_corrected_p90_stays_within_max_tokens() -> None:
    known = JudgedEstimates()
    for _ in range(300):
        known.correction.judge(50, within=False)
    assert told(known, at=900, p50=40, p90=90)[1] > 1_000
    assert told(known, name="bounded", at=900, p50=40, p90=90, left=100) == (940, 1_000)


def test_each_doubling_of_a_request_is_judged_once_and_one_that_moves_is_not() -> None:
    known = JudgedEstimates()
    for generated in range(1, 65):
        told(known, name="s", at=generated, p50=5, p90=9)
        told(known, name="gone", at=generated, p50=5, p90=9)
    known.left("s", 64, ended=True)
    known.left("gone", 64, ended=False)
    assert known.coverage.judged == 7
