"""Differences between equal steps, and what is left of them in sums."""

from __future__ import annotations

import numpy as np
import pytest
from millrace.contracts.status import BatchComposition
from millrace.profiling.records import PlannedSequence, Round, RoundRecord, StepRecord

from bench.engine.noise import error, spread, sums, times

LOAD = Round(name="a", sequences=(PlannedSequence(prompt_tokens=1, output_tokens=2),))


def record(*walls: int) -> RoundRecord:
    steps = [StepRecord(batch=BatchComposition(), sequences=(0,), wall_ns=ns, cpu_ns=ns // 2) for ns in walls]
    return RoundRecord(round=LOAD, steps=steps)


def test_passes_are_rows_and_steps_of_all_rounds_are_columns() -> None:
    repeats = [[record(10, 20), record(12, 22)], [record(30), record(32)]]

    assert times(repeats, cpu=False).tolist() == [[10, 20, 30], [12, 22, 32]]
    assert times(repeats, cpu=True).tolist() == [[5, 10, 15], [6, 11, 16]]


def test_equal_passes_do_not_spread() -> None:
    assert spread(np.array([[10.0, 20.0]] * 3)) == 0


def test_a_step_is_held_against_the_median_of_the_other_passes() -> None:
    # 11 told where 10 were measured, 10 where 12, 11 where 10
    assert spread(np.array([[10.0], [12.0], [10.0]])) == pytest.approx((0.1 + 2 / 12 + 0.1) / 3)


def test_noise_of_single_steps_is_less_in_their_sums() -> None:
    rng = np.random.default_rng(1)
    steps = 1000 * rng.uniform(0.8, 1.2, size=(5, 400))

    assert spread(sums(steps, 50)) < spread(steps) / 4


def test_sums_leave_out_what_does_not_fill_one() -> None:
    assert sums(np.array([[1.0, 2.0, 3.0, 4.0, 5.0]]), 2).tolist() == [[3, 7]]
    assert sums(np.array([1.0, 2.0, 3.0]), 3).tolist() == [6]


def test_an_error_is_relative_to_what_was_measured() -> None:
    assert error(np.array([10.0, 30.0]), np.array([[20.0, 30.0], [10.0, 20.0]])) == pytest.approx((0.5 + 0.5) / 4)
