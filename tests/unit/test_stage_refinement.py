"""Boundary refinement: digests of lengths, the best boundary, and the bounds on each round."""

import random

import msgspec
import pytest
from millrace.contracts.plan import Plan, Stage
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
