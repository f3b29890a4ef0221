"""Copying between two mapped regions, in steps of any size, within bounds; and the copier that two engines choose."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from millrace.contracts.kv import CopierKind, KvEndpoint, KvRank
from millrace.kvcopy.choice import BEST_FIRST, choose
from millrace.kvcopy.copier_port import CopierError, CopyPlan
from millrace.kvcopy.memory import SteppedTransfer, check_bounds
from millrace.kvcopy.shared_memory_copier import copy_pieces

SIZE = 200


def copies_of(pieces: list[tuple[int, int, int]]) -> CopyPlan:
    columns = np.array(pieces, dtype=np.int64).reshape(len(pieces), 3).T.copy()
    return CopyPlan(source=columns[0], target=columns[1], lengths=columns[2])


@st.composite
def plans(draw: st.DrawFn) -> CopyPlan:
    lengths = draw(st.lists(st.integers(1, 40), max_size=5))
    ends = np.cumsum([0, *lengths])
    pieces = [
        (draw(st.integers(0, SIZE - length)), int(start), length)
        for start, length in zip(ends[:-1], lengths, strict=True)
    ]
    return copies_of(pieces)


@settings(max_examples=200)
@given(copies=plans(), step=st.integers(1, 70))
def test_steps_of_any_size_reach_the_same_bytes(copies: CopyPlan, step: int) -> None:
    source = np.arange(1, SIZE + 1, dtype=np.uint8)
    target, expected = np.zeros(SIZE, np.uint8), np.zeros(SIZE, np.uint8)
    for here, there, length in zip(copies.source, copies.target, copies.lengths, strict=True):
        expected[there : there + length] = source[here : here + length]
    position, left = (0, 0), copies.bytes
    while left > 0:
        position = copy_pieces(copies, source, target, position, step)
        left -= step
        assert np.count_nonzero(target) == copies.bytes - max(left, 0)
    assert position == (copies.descriptors, 0)
    assert np.array_equal(target, expected)


@pytest.mark.parametrize(
    ("pieces", "position"),
    [
        pytest.param([(SIZE - 4, 0, 5)], (0, 0), id="past the source"),
        pytest.param([(0, SIZE - 4, 5)], (0, 0), id="past the target"),
        pytest.param([(-1, 0, 5)], (0, 0), id="before the source"),
        pytest.param([(2**63 - 1, 0, 5)], (0, 0), id="overflowing"),
        pytest.param([(0, 0, 0)], (0, 0), id="empty"),
        pytest.param([(0, 0, 5)], (2, 0), id="behind the last piece"),
        pytest.param([(0, 0, 5)], (0, 5), id="behind the end of a piece"),
        pytest.param([(0, 0, 5)], (-1, 0), id="before the first piece"),
        pytest.param([(0, 0, 5)], (0, -1), id="before the piece's first byte"),
    ],
)
def test_a_copy_refuses_what_would_leave_the_memory(pieces, position) -> None:
    memory, target = np.ones(SIZE, np.uint8), np.zeros(SIZE, np.uint8)
    with pytest.raises(ValueError, match=r"outside a region|none of its plan"):
        copy_pieces(copies_of(pieces), memory, target, position, 100)
    assert not target.any()


def test_a_copy_writes_to_no_read_only_memory() -> None:
    target = np.zeros(SIZE, np.uint8)
    target.flags.writeable = False
    with pytest.raises(TypeError):
        copy_pieces(copies_of([(0, 0, 5)]), np.ones(SIZE, np.uint8), target, (0, 0), 9)


def test_a_plan_whose_columns_differ_in_length_is_refused() -> None:
    whole = copies_of([(0, 0, 1), (1, 1, 1)])
    torn = CopyPlan(source=whole.source, target=whole.target[:1], lengths=whole.lengths)
    with pytest.raises(CopierError, match="1 target offsets for 2 lengths"):
        check_bounds(torn, source_bytes=10, target_bytes=10)


def test_a_failed_step_ends_the_transfer() -> None:
    asked: list[int] = []

    def copy(position: tuple[int, int], bytes_max: int) -> tuple[int, int]:
        asked.append(bytes_max)
        raise CopierError("torn")

    transfer = SteppedTransfer(3, copy=copy, check=lambda: None)
    with pytest.raises(CopierError, match="torn"):
        transfer.advance(7)
    with pytest.raises(CopierError, match="failed before"):
        transfer.advance(7)
    assert asked == [7]


SHARED, NIXL = CopierKind.SHARED_MEMORY, CopierKind.NIXL
EVERY = [SHARED, NIXL]


def endpoint(*, copiers: list[CopierKind] = EVERY, machine: str = "m", device: int = -1) -> KvEndpoint:
    ranks = [KvRank(planes=[], region_bytes=0, device=device)]
    return KvEndpoint(
        fingerprint="f", block_tokens=16, block_bytes=64, blocks=8, copiers=copiers, ranks=ranks, machine=machine
    )


@pytest.mark.parametrize(
    ("own", "peer", "kinds"),
    [
        pytest.param(endpoint(), endpoint(), [SHARED, NIXL], id="one host"),
        pytest.param(endpoint(), endpoint(machine="n"), [NIXL], id="two hosts"),
        pytest.param(endpoint(machine=""), endpoint(machine=""), [NIXL], id="hosts not known"),
        pytest.param(endpoint(device=0), endpoint(device=1), [NIXL], id="two GPUs of a host"),
        pytest.param(endpoint(device=0), endpoint(), [NIXL], id="a GPU and host memory"),
        pytest.param(endpoint(copiers=[NIXL]), endpoint(copiers=[NIXL, SHARED]), [NIXL], id="one in common"),
        pytest.param(endpoint(copiers=[NIXL]), endpoint(copiers=[SHARED]), [], id="none in common"),
    ],
)
def test_what_both_ends_and_the_path_allow(own: KvEndpoint, peer: KvEndpoint, kinds: list[CopierKind]) -> None:
    choice = choose(own, peer)
    assert choice.kinds == kinds
    assert set(choice.refused) == set(BEST_FIRST) - set(kinds)
    assert all(choice.refused.values())


def test_a_forced_order_is_kept_and_nothing_else_is_used() -> None:
    assert choose(endpoint(), endpoint(), forced=[NIXL, SHARED]).kinds == [NIXL, SHARED]
    choice = choose(endpoint(), endpoint(), forced=[NIXL])
    assert choice.kinds == [NIXL]
    assert choice.refused[SHARED] == "not among the forced ones"


def test_the_line_for_an_operator_names_the_choice_and_every_reason() -> None:
    text = choose(endpoint(copiers=[SHARED, NIXL]), endpoint(copiers=[SHARED])).text
    assert text.startswith("shared_memory (")
    assert "nixl: not offered by the peer" in text
    assert "modelled: not available here" in text
    assert choose(endpoint(copiers=[]), endpoint()).text.startswith("no copier (")
