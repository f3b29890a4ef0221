"""Plans handed out in slices: every byte once, in order, never more than asked for."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from millrace.kvcopy.copier_port import CopyPlan
from millrace.kvcopy.pieces import Slices

Pairs = list[tuple[int, int]]


def plan_of(*pieces: tuple[int, int, int]) -> CopyPlan:
    rows = np.array(pieces, dtype=np.int64).reshape(-1, 3)
    return CopyPlan(source=rows[:, 0].copy(), target=rows[:, 1].copy(), lengths=rows[:, 2].copy())


def bytes_of(plan: CopyPlan) -> Pairs:
    """The naive expansion: (source byte, target byte) of every byte, in order."""
    rows = zip(plan.source.tolist(), plan.target.tolist(), plan.lengths.tolist(), strict=True)
    return [(source + i, target + i) for source, target, length in rows for i in range(length)]


plans = st.lists(st.tuples(st.integers(0, 999), st.integers(0, 999), st.integers(1, 40)), max_size=12).map(
    lambda pieces: plan_of(*pieces)
)


@given(plans, st.lists(st.tuples(st.integers(1, 50), st.integers(1, 4)), min_size=1, max_size=6))
def test_slices_are_the_plan_byte_for_byte_within_both_limits(plan: CopyPlan, limits: list[tuple[int, int]]) -> None:
    slices, got, turn = Slices(plan), [], 0
    while slices.left:
        bytes_max, pieces_max = limits[turn % len(limits)]
        piece = slices.take(bytes_max=bytes_max, pieces_max=pieces_max)
        assert 0 < piece.bytes <= bytes_max
        assert piece.descriptors <= pieces_max
        assert (piece.lengths > 0).all()
        got += bytes_of(piece)
        turn += 1
    assert got == bytes_of(plan)


def test_taking_slices_leaves_the_plan_as_it_was() -> None:
    plan = plan_of((0, 100, 10), (50, 200, 10))
    Slices(plan).take(bytes_max=15, pieces_max=9)
    assert bytes_of(plan) == bytes_of(plan_of((0, 100, 10), (50, 200, 10)))
