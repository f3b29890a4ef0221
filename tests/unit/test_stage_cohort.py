"""Lengths of arrivals, those that still run included."""

import random

import pytest
from millrace.policies.stages.cohort import ARRIVALS_MAX, ArrivalCohort

S = 1_000_000_000


def steady(seconds: int, *, rate: int = 20, pace: int = 25, mean: float = 2_000.0) -> ArrivalCohort:
    """Exponential outputs from an empty cluster in which everybody generates at the same pace, tokens per second."""
    rng, cohort = random.Random(11), ArrivalCohort()
    running: dict[str, tuple[float, int]] = {}
    for second in range(1, seconds + 1):
        for index in range(rate):
            name, output = f"r{second}/{index}", 1 + round(rng.expovariate(1 / mean))
            cohort.arrive(name, prompt=300, max_tokens=100_000, choices=1, now_ns=second * S)
            running[name] = (cohort.generated, output)
        cohort.progress(pace)
        for name, (began, output) in list(running.items()):
            if cohort.generated - began >= output:
                cohort.end(name, outputs=(output,), cached=0)
                del running[name]
    return cohort


@pytest.mark.parametrize("seconds", [40, 80, 160])
def test_the_mean_output_is_known_long_before_the_long_ones_have_ended(seconds: int) -> None:
    # After 40 s nobody has generated more than 1,000 tokens, the mean is 2,000; of those that ended it is 400.
    found = steady(seconds).statistics(seconds * S)
    assert found.requests_per_s == pytest.approx(20.0, rel=0.06)
    assert found.output_tokens_mean == pytest.approx(2_000, rel=0.25)


def test_without_running_requests_it_is_what_ended() -> None:
    cohort = ArrivalCohort()
    for index in range(50):
        cohort.arrive(f"r{index}", prompt=100, max_tokens=1_000, choices=1, now_ns=(1 + index) * S)
        cohort.end(f"r{index}", outputs=(40,), cached=20)
    found = cohort.statistics(51 * S)
    assert found.decode_tokens.sum() == pytest.approx(50 * 40)
    assert found.prefill_tokens.sum() == pytest.approx(50 * 80)
    assert found.requests_per_s == pytest.approx(1.0)


def test_choices_count_each_and_further_ones_find_the_prompt_in_the_cache() -> None:
    cohort = ArrivalCohort()
    for index in range(30):
        cohort.arrive(f"r{index}", prompt=100, max_tokens=1_000, choices=3, now_ns=(1 + index) * S)
        cohort.end(f"r{index}", outputs=(5, 0, 7), cached=0)
    found = cohort.statistics(31 * S)
    assert found.requests == 60
    assert found.prefill_tokens.sum() == pytest.approx(30 * 100)


def test_too_few_ends_say_nothing() -> None:
    cohort = ArrivalCohort()
    for index in range(500):
        cohort.arrive(f"r{index}", prompt=100, max_tokens=1_000, choices=1, now_ns=S)
    assert cohort.statistics(2 * S) is None


def test_old_arrivals_are_dropped_and_memory_is_bounded() -> None:
    cohort = ArrivalCohort()
    for index in range(ARRIVALS_MAX + 10):
        cohort.arrive(f"r{index}", prompt=100, max_tokens=1_000, choices=1, now_ns=(1 + index) * S)
    assert len(cohort.arrived) == len(cohort.open) == ARRIVALS_MAX
    cohort.forget((ARRIVALS_MAX + 1) * S)
    assert len(cohort.arrived) == len(cohort.open) == 10
    assert cohort.since_ns == (ARRIVALS_MAX + 1) * S
