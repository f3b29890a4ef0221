"""The paper's boundary of one instance, and its equation 1."""

import random

import msgspec
import pytest

from papers.cascadeinfer.equation1 import QualityModel
from papers.cascadeinfer.refinement import divide, paper_boundary

QUALITY = QualityModel(d0=1e-3, d1=1e-6, d4=1e-6)


def test_the_set_division_starts_at_the_middle() -> None:
    assert divide([8, 1, 5, 3, 7, 2, 6, 4], 4) == [3, 7]
    assert divide([3, 1, 2], 1) == [1, 2, 3]


def test_the_papers_boundary_is_the_least_cost_over_all_splits() -> None:
    rng = random.Random(7)
    for _ in range(50):
        own = [rng.randint(1, 500) for _ in range(rng.randint(0, 12))]
        successors = [rng.randint(300, 4000) for _ in range(rng.randint(0, 12))]
        found = paper_boundary(own, successors, 3, QUALITY)
        lengths = sorted([*own, *divide(successors, 3)])
        if len(lengths) < 5:
            assert found is None
            continue
        splits = [
            QUALITY.batch(i, sum(lengths[:i])) + QUALITY.batch(len(lengths) - i, sum(lengths[i:]))
            for i in range(len(lengths))
        ]
        best = [length for length, cost in zip(lengths, splits, strict=True) if cost == pytest.approx(min(splits))]
        assert found in best


@pytest.mark.parametrize("field", ["d0", "d4"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_coefficients_that_make_no_sense_are_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        msgspec.convert({"d0": 1.0, field: value}, QualityModel)
