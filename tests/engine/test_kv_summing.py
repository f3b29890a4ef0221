"""Checksums of blocks between steps: which blocks, how many at a time, and what stands for the rest."""

from collections.abc import Sequence
from typing import Any, cast

import pytest
from millrace.contracts.kv import UNSUMMED

from services.worker.vllm_engine.kv_ranks import BlockSampler, Ranks, Summing


class TwoRanks:
    """Their sums are the block ids, and those times ten."""

    def __init__(self) -> None:
        self.asked: list[list[list[int]]] = []

    def checksums(self, rows: Sequence[list[int]]) -> list[list[int]]:
        self.asked.append(list(rows))
        return [[block for (block,) in rows], [10 * block for (block,) in rows]]


def summing(ranks: TwoRanks, blocks: list[int], wanted: list[bool]) -> Summing:
    return Summing(cast(Ranks, ranks), [[block] for block in blocks], row_bytes=100, wanted=wanted)


def test_a_share_of_the_bytes_is_summed_at_a_time_and_at_least_a_block() -> None:
    ranks = TwoRanks()
    work = summing(ranks, [5, 6, 7], [True] * 3)
    assert [work.advance(200), work.advance(1)] == [False, True]
    assert ranks.asked == [[[5], [6]], [[7]]]
    assert work.sums == [[5, 6, 7], [50, 60, 70]]


def test_blocks_outside_the_sample_are_not_read_and_say_so() -> None:
    ranks = TwoRanks()
    work = summing(ranks, [5, 6, 7], [False, True, False])
    assert work.advance(1000)
    assert ranks.asked == [[[6]]]
    assert work.sums == [[UNSUMMED, 6, UNSUMMED], [UNSUMMED, 60, UNSUMMED]]


@pytest.mark.parametrize("wanted", [[], [False, False]])
def test_where_no_block_is_wanted_nobody_is_asked(wanted: list[bool]) -> None:
    ranks = TwoRanks()
    work = summing(ranks, [5, 6], wanted)
    assert work.advance(1000)
    assert (work.sums, ranks.asked) == ([], [])


@pytest.mark.parametrize(("share", "taken"), [(0.0, 0), (1 / 16, 2), (0.25, 8), (1.0, 32)])
def test_a_sample_takes_its_share_however_few_blocks_come_at_a_time(share: float, taken: int) -> None:
    sample: Any = BlockSampler(share)
    assert sum(sum(sample.take(count)) for count in (1, 2, 3, 4, 5, 6, 7, 4)) == taken
