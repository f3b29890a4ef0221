"""Boundaries refined by lengths: digests, the best boundary, the bounds on each round, and lengths of arrivals."""

import random

import msgspec
import pytest
from millrace.contracts.plan import Plan, Stage
from millrace.policies.stages.cohort import ARRIVALS_MAX, ArrivalCohort
from millrace.policies.stages.digest import LengthDigest, digest, merged
from millrace.policies.stages.refinement import BoundaryView, RefinementParameters, StepLine, refine

#: Attention dominates, so that the best boundary is where lengths are shared well.
STEP = StepLine(fixed=1e-3, per_sequence=1e-6, per_token=1e-6)
WHOLE_WAY = RefinementParameters(smoothing=1.0, step_max=100.0)


def view(
    lengths: list[int], cut: int, *, lower: int = 1, upper: int = 1, below: int = 0, above: int | None = None
) -> BoundaryView:
    return BoundaryView(
        cut=cut,
        cut_below=below,
        cut_above=above,
        lower=digest(length for length in lengths if length < cut),
        upper=digest(length for length in lengths if length >= cut),
        lower_instances=lower,
        upper_instances=upper,
    )


def spread(seed: int, count: int = 2000) -> list[int]:
    rng = random.Random(seed)
    return [min(200_000, max(1, round(rng.lognormvariate(6.5, 1.2)))) for _ in range(count)]


def test_a_digest_counts_each_length_once_and_merges() -> None:
    lengths = [0, 1, 31, 32, 5000, 1 << 21]
    whole = digest(lengths)
    assert (whole.sequences, sum(whole.tokens)) == (len(lengths), sum(lengths))
    assert merged([digest(lengths[:3]), digest(lengths[3:])]) == whole
    assert merged([]) == digest([]) == LengthDigest()


@pytest.mark.parametrize("bad", [([1], [1, 2]), ([0] * 41, [0] * 41), ([-1], [0]), ([0, 1], [0, 5]), ([0], [4])])
def test_a_digest_that_cannot_be_is_refused(bad: tuple[list[int], list[int]]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(bad), type=LengthDigest)


def exact_cost(lengths: list[int], cut: int, lower: int, upper: int) -> float:
    low, high = [x for x in lengths if x < cut], [x for x in lengths if x >= cut]
    return STEP.summed(len(low), sum(low), lower) + STEP.summed(len(high), sum(high), upper)


@pytest.mark.parametrize("sides", [(1, 1), (4, 2), (2, 6)])
def test_it_finds_the_best_boundary_of_the_raw_lengths_within_the_bins(sides: tuple[int, int]) -> None:
    for seed in range(5):
        lengths = spread(seed)
        found = refine(view(lengths, 700, lower=sides[0], upper=sides[1]), WHOLE_WAY, STEP).cut
        best = min(exact_cost(lengths, cut, *sides) for cut in range(50, 20_000, 50))
        assert exact_cost(lengths, found, *sides) <= best * 1.01


def test_one_round_moves_by_a_tenth_at_most_and_rounds_converge() -> None:
    lengths, cut = spread(4), 100
    target = refine(view(lengths, cut), WHOLE_WAY, STEP).best
    for _ in range(80):
        after = refine(view(lengths, cut), RefinementParameters(), STEP).cut
        assert cut / 1.101 - 1 <= after <= cut * 1.101 + 1
        cut = after
    assert cut == pytest.approx(target, rel=0.15)


def test_fewer_than_five_sequences_or_a_side_without_instances_freeze_it() -> None:
    frozen = refine(view([10, 20, 3000, 4000], 700), RefinementParameters(), STEP)
    assert (frozen.cut, frozen.best) == (700, 700)
    assert "frozen" in frozen.reason
    assert refine(view([10, 20, 30, 3000, 4000], 700), RefinementParameters(), STEP).cut != 700
    assert refine(view(spread(5), 700, lower=0), RefinementParameters(), STEP).cut == 700


def test_it_stays_between_the_neighbouring_cuts() -> None:
    for seed in range(20):
        lengths = spread(seed)
        moved = refine(view(lengths, 700, below=650, above=800), WHOLE_WAY, STEP).cut
        assert 650 < moved < 800
    assert refine(view(lengths, 700, below=690, above=710), WHOLE_WAY, STEP).reason.startswith("frozen")


@pytest.mark.parametrize(
    ("refined", "cuts"),
    [
        ({}, [100, 200, 300]),
        ({"s0": 150, "s2": 900}, [150, 200, 900]),
        ({"s0": 250, "s1": 280}, [250, 280, 300]),  # beyond the plan's next cut, which has moved as well
        ({"s0": 180, "s1": 150}, [100, 200, 300]),  # crossed: neither counts
        ({"s1": 90, "s2": 250}, [100, 200, 250]),
        ({"s0": 0, "s1": -5}, [100, 200, 300]),
        ({"s3": 40, "other": 7}, [100, 200, 300]),
    ],
)
def test_refined_boundaries_replace_the_plans_where_they_do_not_cross(refined: dict[str, int], cuts: list[int]) -> None:
    ranges = [0, 100, 200, 300]
    stages = [
        Stage(name=f"s{index}", length_min=begin, length_max=end, instances=[f"i{index}"])
        for index, (begin, end) in enumerate(zip(ranges, [*ranges[1:], None], strict=True))
    ]
    plan = Plan(model="m", epoch=1, stages=stages, coordinator="c")
    assert plan.present_cuts(refined) == cuts


# Lengths of arrivals, those that still run included.


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


def arrived(count: int, *, choices: int = 1, outputs: tuple[int, ...] = (), cached: int = 0) -> ArrivalCohort:
    """One request a second, from the first second on; each has ended at once where outputs are told."""
    cohort = ArrivalCohort()
    for index in range(count):
        cohort.arrive(f"r{index}", prompt=100, max_tokens=1_000, choices=choices, now_ns=(1 + index) * S)
        if outputs:
            cohort.end(f"r{index}", outputs=outputs, cached=cached)
    return cohort


def test_without_running_requests_it_is_what_ended() -> None:
    found = arrived(50, outputs=(40,), cached=20).statistics(51 * S)
    assert found.decode_tokens.sum() == pytest.approx(50 * 40)
    assert found.prefill_tokens.sum() == pytest.approx(50 * 80)
    assert found.requests_per_s == pytest.approx(1.0)


def test_choices_count_each_and_further_ones_find_the_prompt_in_the_cache() -> None:
    found = arrived(30, choices=3, outputs=(5, 0, 7)).statistics(31 * S)
    assert found.requests == 60
    assert found.prefill_tokens.sum() == pytest.approx(30 * 100)


def test_too_few_ends_say_nothing() -> None:
    assert arrived(500).statistics(501 * S) is None


def test_old_arrivals_are_dropped_and_memory_is_bounded() -> None:
    cohort = arrived(ARRIVALS_MAX + 10)
    assert len(cohort.arrived) == len(cohort.open) == ARRIVALS_MAX
    cohort.forget((ARRIVALS_MAX + 1) * S)
    assert len(cohort.arrived) == len(cohort.open) == 10
    assert cohort.since_ns == (ARRIVALS_MAX + 1) * S
