"""Choice of the estimate that an instance tells of a sequence's rest: the engine's, the submitted one, survival's."""

import msgspec
import numpy as np
import pytest
from millrace.contracts.status import SequenceState, SequenceStatus
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
