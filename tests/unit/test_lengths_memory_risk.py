"""The risk that memory runs short, against lives drawn at random."""

import math
import random
from typing import Any

import msgspec
import pytest
from millrace.contracts.kv import KvGroup, KvNeed
from millrace.contracts.status import SequenceState, SequenceStatus, StatusSnapshot
from millrace.lengths.memory_risk import memory_risk

from tests.testbed.messages import plain_snapshot

BLOCK = 16


def entry(length: int, *, output: int = 10, p50: int = 100, p90: int = 400, at: int | None = None) -> SequenceStatus:
    """A running sequence of ``length`` tokens whose rest is estimated at ``at`` output tokens, now if None."""
    made = output if at is None else at
    return SequenceStatus(
        "r.0",
        SequenceState.RUNNING,
        length - output,
        length,
        output,
        10_000,
        -(-length // BLOCK),
        0,
        made + p50,
        "",
        made + p90,
        made,
    )


def snapshot(*running: SequenceStatus, total: int, others: int = 0) -> StatusSnapshot:
    held = sum(each.blocks for each in running)
    return plain_snapshot("w0", running=list(running), blocks_free=total - held - others, blocks_total=total)


def risk(state: StatusSnapshot, horizon: int = 160, **fields: Any) -> float:
    return memory_risk(state, block_size=BLOCK, horizon_tokens=horizon, **fields)


def test_a_full_window_needs_no_more_blocks_and_every_group_counts() -> None:
    window = KvGroup(need=KvNeed.WINDOW, block_tokens=BLOCK, block_bytes=1, window=4 * BLOCK)
    whole = msgspec.structs.replace(window, need=KvNeed.ALL)
    state = snapshot(*[entry(150, output=10, at=10) for _ in range(30)], total=330)
    assert risk(state) > 0.1
    assert risk(state, groups=[window]) < 1e-9
    assert risk(state, groups=[window, whole]) > risk(state)


def drawn(state: StatusSnapshot, ahead: int, *, since: int = 0, draws: int = 4_000) -> float:
    """Share of drawn futures in which the blocks do not suffice."""
    rng = random.Random(3)
    scale, shape = 101.0, math.log(9) / (math.log(401) - math.log(101))
    over = 0
    for _ in range(draws):
        blocks = state.blocks_total - state.blocks_free - sum(each.blocks for each in state.running)
        for each in state.running:
            rest = -1.0
            while rest <= since:
                rest = scale * (1 / rng.uniform(1e-12, 1.0) - 1) ** (1 / shape) - 1
            if rest > since + ahead:
                blocks += -(-(each.prompt_tokens + each.output_tokens + ahead) // BLOCK)
        over += blocks > state.blocks_total
    return over / draws


@pytest.mark.parametrize(("total", "since"), [(330, 0), (380, 0), (430, 0), (430, 80)])
def test_probabilities_are_those_of_drawn_futures(total: int, since: int) -> None:
    running = [entry(150 + 7 * index, output=10 + since, at=10) for index in range(30)]
    state = snapshot(*running, total=total)
    for ahead in (40, 80, 160):
        assert risk(state, ahead, points=1) == pytest.approx(drawn(state, ahead, since=since), abs=0.06)


def test_a_sequence_of_which_nothing_is_known_goes_on_to_its_bound() -> None:
    blind = msgspec.structs.replace(
        entry(160), expected_output_tokens=None, expected_at=None, expected_p90=None, max_tokens=60
    )
    state = snapshot(blind, total=12)
    assert [risk(state, ahead, points=1) for ahead in (16, 32, 48, 64)] == [0.0, 0.0, 1.0, 0.0]
    assert risk(state, 64, points=4) == 1.0


def test_an_idle_instance_risks_nothing_and_sizes_must_be_positive() -> None:
    assert risk(snapshot(total=10)) == 0.0
    with pytest.raises(ValueError, match="horizon_tokens 0"):
        risk(snapshot(total=10), horizon=0)


def test_estimates_that_no_sequence_can_have_count_as_none() -> None:
    broken = msgspec.structs.replace(entry(160), expected_p90=5)
    assert [risk(snapshot(broken, total=total), points=1) for total in (19, 20)] == [1.0, 0.0]
