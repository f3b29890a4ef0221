"""The planner: byte for byte what the naive expansion copies, in the fewest pieces; slices of plans, within limits."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from millrace.contracts.kv import KvPlane, KvRank
from millrace.kvcopy.copier_port import CopyPlan
from millrace.kvcopy.pieces import Slices
from millrace.kvcopy.plan import Planner
from millrace.kvcopy.shared_memory_copier import copy_pieces

BLOCKS = 24


def region(planes: list[KvPlane]) -> KvRank:
    return KvRank(planes=planes, region_bytes=max((p.offset + BLOCKS * p.stride for p in planes), default=0) + 64)


def layer_major(planes: int, *, bytes_: int = 8, gap: int = 0, blocks: int = BLOCKS) -> KvRank:
    """Each plane's blocks one behind the other, ``gap`` bytes after each block."""
    stride = bytes_ + gap
    return region([KvPlane(index * blocks * stride, stride, bytes_) for index in range(planes)])


def block_major(planes: int, *, bytes_: int = 8, gap: int = 0) -> KvRank:
    """Each block's planes one behind the other, ``gap`` bytes after each block."""
    stride = planes * bytes_ + gap
    return region([KvPlane(index * bytes_, stride, bytes_) for index in range(planes)])


@st.composite
def ranks(draw: st.DrawFn, sizes: list[int]) -> KvRank:
    """Planes of these block sizes laid out somehow, not overlapping: groups of interleaved planes, with gaps."""
    planes, offset, index = [], draw(st.integers(0, 9)), 0
    while index < len(sizes):
        group = sizes[index : index + draw(st.integers(1, len(sizes)))]
        stride = sum(group) + draw(st.sampled_from([0, 0, 3]))
        starts = [offset + sum(group[:place]) for place in range(len(group))]
        planes += [KvPlane(start, stride, size) for start, size in zip(starts, group, strict=True)]
        offset += BLOCKS * stride + draw(st.sampled_from([0, 0, 5]))
        index += len(group)
    return region(planes)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two block lists made of runs, in any order; no target twice."""
    target = draw(st.permutations(range(BLOCKS)))[: draw(st.integers(0, BLOCKS))]
    if draw(st.booleans()):  # a source block may go to several targets
        return draw(st.lists(st.integers(0, BLOCKS - 1), min_size=len(target), max_size=len(target))), target
    shift = draw(st.integers(0, BLOCKS - 1))
    cut = draw(st.integers(0, BLOCKS))
    return [(block + (shift if block < cut else 0)) % BLOCKS for block in target], target


def naive(source: KvRank, target: KvRank, blocks: tuple[list[int], list[int]]) -> list[tuple[int, int, int]]:
    """One piece for each block of each plane."""
    return [
        (here.offset + one * here.stride, there.offset + other * there.stride, here.bytes)
        for here, there in zip(source.planes, target.planes, strict=True)
        for one, other in zip(*blocks, strict=True)
    ]


def fewest(pieces: list[tuple[int, int, int]]) -> int:
    """Pieces that are left when all that touch on both sides are joined."""
    ends = {(here + length, there + length) for here, there, length in pieces}
    return sum((here, there) not in ends for here, there, _ in pieces)


def carried_out(copies: CopyPlan, source: KvRank, target: KvRank) -> bytes:
    memory, result = contents(source), np.zeros(target.region_bytes, np.uint8)
    copy_pieces(copies, memory, result, (0, 0), 1 << 30)
    return result.tobytes()


def contents(rank: KvRank) -> np.ndarray:
    return np.random.default_rng(rank.region_bytes).integers(1, 256, rank.region_bytes, dtype=np.uint8)


def by_naive_expansion(source: KvRank, target: KvRank, blocks: tuple[list[int], list[int]]) -> bytes:
    memory, result = contents(source).tobytes(), bytearray(target.region_bytes)
    for here, there, length in naive(source, target, blocks):
        result[there : there + length] = memory[here : here + length]
    return bytes(result)


@settings(max_examples=200)
@given(data=st.data(), sizes=st.lists(st.sampled_from([1, 4, 6]), max_size=5), blocks=pairs())
def test_a_plan_copies_what_the_naive_expansion_copies(
    data: st.DataObject, sizes: list[int], blocks: tuple[list[int], list[int]]
) -> None:
    source, target = data.draw(ranks(sizes)), data.draw(ranks(sizes))
    copies = Planner(source, target).plan(*blocks)
    assert copies.bytes == sum(sizes) * len(blocks[0])
    assert carried_out(copies, source, target) == by_naive_expansion(source, target, blocks)


@settings(max_examples=200)
@given(
    layouts=st.sampled_from(
        [(layer_major, {}), (layer_major, {"gap": 8}), (block_major, {}), (block_major, {"gap": 8})]
    ),
    planes=st.integers(1, 4),
    blocks=pairs(),
)
def test_equal_layouts_take_the_fewest_pieces_that_there_can_be(
    layouts: tuple, planes: int, blocks: tuple[list[int], list[int]]
) -> None:
    make, options = layouts
    rank = make(planes, **options)
    # Never the last block of a plane: where it meets the next plane's first, runs of two alignments may touch.
    blocks = tuple(
        list(side) for side in zip(*[p for p in zip(*blocks, strict=True) if BLOCKS - 1 not in p], strict=True)
    ) or ([], [])
    assert Planner(rank, rank).plan(*blocks).descriptors == fewest(naive(rank, rank, blocks))


@pytest.mark.parametrize(
    ("source", "target", "says"),
    [
        pytest.param([1, 2], [1], "2 source blocks for 1", id="lists of different lengths"),
        pytest.param([-1], [1], "block id -1", id="a negative source"),
        pytest.param([1], [-2], "block id -2", id="a negative target"),
        pytest.param([1 << 31], [1], "block id 2147483648", id="an id above all"),
    ],
)
def test_lists_that_cannot_be_are_refused(source: list[int], target: list[int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Planner(layer_major(1), layer_major(1)).plan(source, target)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(layer_major(2), layer_major(3), id="in number"),
        pytest.param(layer_major(2), layer_major(2, bytes_=16), id="in bytes"),
    ],
)
def test_regions_of_different_planes_are_refused(one: KvRank, other: KvRank) -> None:
    with pytest.raises(ValueError, match="different planes"):
        Planner(one, other)


@pytest.mark.parametrize(
    "plane", [KvPlane(-1, 8, 8), KvPlane(0, 4, 8), KvPlane(0, 8, 0), KvPlane(1 << 61, 8, 8), KvPlane(0, 1 << 32, 8)]
)
def test_a_malformed_plane_is_refused(plane: KvPlane) -> None:
    rank = KvRank(planes=[plane], region_bytes=100)
    with pytest.raises(ValueError, match="malformed"):
        Planner(rank, rank)


def plan_of(pieces: list[tuple[int, int, int]]) -> CopyPlan:
    rows = np.array(pieces, dtype=np.int64).reshape(-1, 3)
    return CopyPlan(source=rows[:, 0].copy(), target=rows[:, 1].copy(), lengths=rows[:, 2].copy())


def bytes_of(plan: CopyPlan) -> list[tuple[int, int]]:
    """The naive expansion: (source byte, target byte) of every byte, in order."""
    rows = zip(plan.source.tolist(), plan.target.tolist(), plan.lengths.tolist(), strict=True)
    return [(source + i, target + i) for source, target, length in rows for i in range(length)]


plans = st.lists(st.tuples(st.integers(0, 999), st.integers(0, 999), st.integers(1, 40)), max_size=12).map(plan_of)


@given(plans, st.lists(st.tuples(st.integers(1, 50), st.integers(1, 4)), min_size=1, max_size=6))
def test_slices_are_the_plan_byte_for_byte_within_both_limits(plan: CopyPlan, limits: list[tuple[int, int]]) -> None:
    slices, whole, got, turn = Slices(plan), bytes_of(plan), [], 0
    while slices.left:
        bytes_max, pieces_max = limits[turn % len(limits)]
        piece = slices.take(bytes_max=bytes_max, pieces_max=pieces_max)
        assert 0 < piece.bytes <= bytes_max
        assert piece.descriptors <= pieces_max
        assert (piece.lengths > 0).all()
        got += bytes_of(piece)
        turn += 1
    assert got == bytes_of(plan) == whole, "the plan stays as it was"
