"""Choice of the free blocks to hand out: contiguous runs, the cheapest first."""

from __future__ import annotations

import random

import pytest
from millrace.kvcache.segments import choose, runs


def test_what_follows_the_sequences_last_block_is_taken_first() -> None:
    assert choose([9, 8, 7, 20, 21], 2, after=7) == [8, 9]


def test_a_block_that_extends_nothing_comes_from_the_run_of_the_first_candidate() -> None:
    assert choose([9, 30, 8, 31, 32, 7], 1) == [7]
    assert choose([9, 30, 8, 31, 32, 7], 1, after=3) == [7]


def test_the_oldest_run_that_is_long_enough_is_taken_not_the_longest() -> None:
    assert choose([5, 41, 40, 60, 61, 62, 63], 2) == [40, 41]


def test_where_no_run_is_long_enough_the_longest_come_first_until_one_is() -> None:
    assert choose([5, 41, 40, 60, 61, 62, 90], 5) == [60, 61, 62, 40, 41]
    assert choose([5, 41, 40, 60, 61, 62, 90], 4) == [60, 61, 62, 5]


def test_a_sequence_that_can_be_extended_in_part_takes_the_rest_from_elsewhere() -> None:
    assert choose([3, 20, 21, 22, 4], 5, after=2) == [3, 4, 20, 21, 22]


def test_all_candidates_together_come_sorted_the_extension_first() -> None:
    assert choose([9, 3, 8, 2], 4) == [2, 3, 8, 9]
    assert choose([9, 3, 8, 2], 4, after=7) == [8, 9, 2, 3]


@pytest.mark.parametrize("seed", range(30))
def test_as_many_of_the_candidates_as_asked_for_in_no_more_runs_than_by_strict_order(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        candidates = rng.sample(range(1, 150), rng.randint(1, 80))
        count = rng.randint(1, len(candidates))
        after = rng.choice([-1, rng.randrange(150)])
        chosen = choose(candidates, count, after=after)
        assert len(chosen) == len(set(chosen)) == count
        assert set(chosen) <= set(candidates)
        if after >= 0 and after + 1 in candidates:
            assert chosen[0] == after + 1
        elif count == 1:
            between = range(chosen[0], candidates[0])
            assert set(between) <= set(candidates), "a single block is not of the oldest candidate's run"
        assert runs(chosen) <= runs(sorted(candidates[:count])) + (after + 1 in candidates)


def test_runs_are_counted_as_pieces_of_memory() -> None:
    assert runs([]) == 0
    assert runs([4, 5, 6]) == 1
    assert runs([6, 5, 4]) == 3
    assert runs([1, 2, 9, 10, 3]) == 3
