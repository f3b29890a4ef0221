"""Estimate of a migration's cost to others: it finds a slow-down that is there, and none where none is."""

from __future__ import annotations

from random import Random

import pytest

from bench.migration_cap import Move, slow_down


def _moves(*, slower: float, count: int = 40) -> list[Move]:
    rng = Random(7)

    def intervals(mean: float) -> list[float]:
        return [rng.expovariate(1 / mean) for _ in range(20)]

    return [
        Move(took=0.1, gap=0.01, bytes=1, inside=intervals(0.01 * (1 + slower)), beside=intervals(0.01))
        for _ in range(count)
    ]


@pytest.mark.parametrize("slower", [0.0, 0.5])
def test_a_slow_down_lies_in_its_interval(slower: float) -> None:
    estimate, low, high = slow_down(_moves(slower=slower))
    assert low < slower < high
    assert low < estimate < high


def test_a_slow_down_of_half_is_told_from_none() -> None:
    assert slow_down(_moves(slower=0.5))[1] > 0.2
