"""Choice of the estimate that an instance tells of a sequence's rest: the engine's, the submitted one, survival's."""

import msgspec
import numpy as np
import pytest
from millrace.contracts.status import SequenceState, SequenceStatus
from millrace.lengths.coverage import FACTOR_MAX, FACTOR_MIN, JUDGED_HIGH_MIN, JUDGED_MIN, Coverage, P90Correction
from millrace.lengths.remaining import STALE_TOKENS, RemainingLengths
from millrace.lengths.survival import Survival


def entry(generated: int, *, expected: int | None = None, name: str = "r.0", **fields: int) -> SequenceStatus:
    status = SequenceStatus(name, SequenceState.RUNNING, 10, 10 + generated, generated, 50_000, 1, 0, expected)
    return msgspec.structs.replace(status, **fields)


def of_engine(generated: int, *, at: int, p50: int, p90: int, name: str = "r.0") -> SequenceStatus:
    return entry(generated, expected=at + p50, expected_p90=at + p90, expected_at=at, name=name)


@pytest.fixture
def taught() -> RemainingLengths:
    """Has seen lengths uniform up to 1,000."""
    survival = Survival()
    for length in np.random.default_rng(1).integers(1, 1_001, 2_000).tolist():
        survival.learn(length)
    return RemainingLengths(survival)


def told(known: RemainingLengths, status: SequenceStatus) -> SequenceStatus:
    return known.reported([status])[0]


def test_a_submitted_length_stands_until_it_is_reached_with_survivals_p90(taught: RemainingLengths) -> None:
    said = told(taught, entry(200, expected=300))
    assert said.expected_output_tokens == 300
    assert said.expected_p90 == pytest.approx(920, abs=30)
    assert said.expected_at == 200


def test_an_outrun_length_becomes_the_median_of_survivors(taught: RemainingLengths) -> None:
    said = told(taught, entry(400, expected=300))
    assert said.expected_output_tokens == pytest.approx(700, abs=30)
    assert said.expected_output_tokens <= said.expected_p90


def test_nothing_submitted_is_survival_from_the_start_within_max_tokens(taught: RemainingLengths) -> None:
    assert told(taught, entry(0)).expected_output_tokens == pytest.approx(500, abs=30)
    bounded = told(taught, entry(100, max_tokens=150))
    assert (bounded.expected_output_tokens, bounded.expected_p90) == (150, 150)
    used_up = told(taught, entry(100, max_tokens=100))
    assert (used_up.expected_output_tokens, used_up.expected_p90) == (101, 101)


def test_p90_is_never_below_a_long_submitted_length(taught: RemainingLengths) -> None:
    said = told(taught, entry(0, expected=5_000))
    assert (said.expected_output_tokens, said.expected_p90) == (5_000, 5_000)


def test_a_fresh_estimate_of_the_engine_stands_and_a_stale_one_does_not(taught: RemainingLengths) -> None:
    fresh = of_engine(300, at=290, p50=50, p90=80)
    assert told(taught, fresh) == fresh
    stale = told(taught, of_engine(300 + STALE_TOKENS, at=299, p50=50, p90=80))
    assert stale.expected_at == 300 + STALE_TOKENS


@pytest.mark.parametrize(("at", "p50", "p90"), [(10, -3, 5), (10, 0, 5), (10, 9, 4), (-5, 20, 30)])
def test_estimates_that_no_sequence_can_have_are_counted_and_ignored(
    taught: RemainingLengths, at: int, p50: int, p90: int
) -> None:
    said = told(taught, of_engine(20, at=at, p50=p50, p90=p90))
    assert said.expected_at == 20
    assert taught.ignored == 1


def _live(known: RemainingLengths, count: int, *, length: int, p90: int) -> None:
    for index in range(count):
        name = f"s{index}.{length}"
        known.reported([of_engine(10, at=10, p50=5, p90=p90, name=name)])
        known.left(name, length, entered=0, ended=True)


def test_an_engine_whose_p90_covers_too_little_is_not_believed_until_it_covers_again(taught: RemainingLengths) -> None:
    _live(taught, JUDGED_MIN, length=500, p90=20)
    estimate = of_engine(300, at=290, p50=50, p90=80)
    assert "p90 covers 0%" in taught.coverage.refusal
    assert told(taught, estimate).expected_at == 300
    for _ in range(400):
        _live(taught, 9, length=25, p90=20)
        _live(taught, 1, length=35, p90=20)
    assert taught.coverage.share == pytest.approx(9 * 15 / (9 * 15 + 25), abs=0.03), "every token weighs the same"
    said = told(taught, estimate)
    assert (said.expected_at, said.expected_output_tokens) == (290, 340)


def test_a_p90_that_covers_everything_is_none_either() -> None:
    coverage = Coverage()
    for _ in range(JUDGED_HIGH_MIN - 1):
        coverage.judge(1, within=True)
    assert not coverage.refusal
    coverage.judge(1, within=True)
    assert "100%" in coverage.refusal


@pytest.mark.parametrize(("p90", "covered"), [(190, 0.925), (157, 0.85)])
def test_a_p90_that_covers_a_little_too_much_or_too_little_is_moved_until_it_covers_90_percent(
    taught: RemainingLengths, p90: int, covered: float
) -> None:
    rng = np.random.default_rng(5)
    lengths = 10 + np.exp(rng.normal(4.0, 0.6, 6_000)).astype(int)  # e^4 = 55 tokens still to come
    told_p90 = []
    for index, length in enumerate(lengths.tolist()):
        said = told(taught, of_engine(10, at=10, p50=55, p90=p90 - 10, name=f"s{index}"))
        assert said.expected_output_tokens == 65, "the median is not touched"
        told_p90.append(said.expected_p90)
        taught.left(f"s{index}", length, entered=0, ended=True)
    after, tokens = slice(2_000, None), lengths - 10  # every token weighs the same
    assert np.average(lengths <= p90, weights=tokens) == pytest.approx(covered, abs=0.02)
    within = lengths <= np.array(told_p90)
    assert np.average(within[after], weights=tokens[after]) == pytest.approx(0.9, abs=0.015)


def test_the_correction_is_bounded_and_stands_still_while_the_engine_is_not_believed(taught: RemainingLengths) -> None:
    _live(taught, 400, length=500, p90=20)
    assert taught.coverage.refusal
    before = taught.correction.factor
    assert 1 < before < FACTOR_MAX
    _live(taught, 100, length=500, p90=20)
    assert taught.correction.factor == before
    for within, bound in ((True, FACTOR_MIN), (False, FACTOR_MAX)):
        correction = P90Correction()
        for _ in range(2_000):
            correction.judge(50, within=within)
        assert correction.factor == pytest.approx(bound)
        assert correction.moved(50, 50) == 50
        assert 50 <= correction.moved(50, 80) <= 400


def test_a_corrected_p90_stays_within_max_tokens(taught: RemainingLengths) -> None:
    for _ in range(300):
        taught.correction.judge(50, within=False)
    estimate = of_engine(900, at=900, p50=40, p90=90)
    assert told(taught, estimate).expected_p90 > 1_000
    assert told(taught, msgspec.structs.replace(estimate, max_tokens=1_000)).expected_p90 == 1_000


def test_each_doubling_of_a_sequence_is_judged_once_and_one_that_moves_is_not(taught: RemainingLengths) -> None:
    for generated in range(1, 65):
        taught.reported([of_engine(generated, at=generated, p50=5, p90=9, name="s.0")])
        taught.reported([of_engine(generated, at=generated, p50=5, p90=9, name="gone.0")])
    taught.left("s.0", 64, entered=0, ended=True)
    taught.left("gone.0", 64, entered=0, ended=False)
    assert taught.coverage.judged == 7


def test_estimates_of_sequences_that_are_no_longer_held_are_forgotten(taught: RemainingLengths) -> None:
    taught.reported([of_engine(5, at=5, p50=5, p90=9, name=name) for name in ("a.0", "b.0")])
    taught.keep(["b.0"])
    taught.left("a.0", 10, entered=0, ended=True)
    assert taught.coverage.judged == 0
    taught.left("b.0", 10, entered=0, ended=True)
    assert taught.coverage.judged == 1
