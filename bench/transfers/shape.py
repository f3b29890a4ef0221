"""The KV that is moved: one shape for all ways, and the block lists of sequences in engines that have been in use."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from millrace.contracts.kv import KvPlane, KvRank
from millrace.kvcopy.copier_port import CopyPlan
from millrace.kvcopy.plan import Planner

from bench import block_lists

LAYERS, KV_HEADS, HEAD_SIZE, ELEMENT_BYTES = 16, 2, 64, 2
#: vLLM on CPU takes multiples of 32.
BLOCK_TOKENS = 32
#: Of one block and layer, keys and values.
PLANE_BYTES = BLOCK_TOKENS * KV_HEADS * HEAD_SIZE * ELEMENT_BYTES * 2
BLOCKS = 4096
REGION_BYTES = BLOCKS * LAYERS * PLANE_BYTES
WORD = np.dtype(np.uint64)


class Arm(NamedTuple):
    """One way to lay out, allocate (``fresh``: from a cache that was never used, in one run) and describe."""

    name: str
    segments: bool = False
    fresh: bool = False
    block_major: bool = False
    aligned: bool = True


ARMS = (
    Arm("stock queue, piece per block and layer", aligned=False),
    Arm("stock queue, per layer, aligned"),
    Arm("segments, per layer, aligned", segments=True),
    Arm("one run, per layer, aligned", fresh=True),
    Arm("stock queue, block-major, aligned", block_major=True),
    Arm("segments, block-major, aligned", segments=True, block_major=True),
    Arm("one run, block-major, aligned", fresh=True, block_major=True),
)


def layout(*, block_major: bool) -> KvRank:
    """Return the layout of blocks in a region."""
    if block_major:
        planes = [KvPlane(layer * PLANE_BYTES, LAYERS * PLANE_BYTES, PLANE_BYTES) for layer in range(LAYERS)]
    else:
        planes = [KvPlane(layer * BLOCKS * PLANE_BYTES, PLANE_BYTES, PLANE_BYTES) for layer in range(LAYERS)]
    return KvRank(planes=planes, region_bytes=REGION_BYTES)


def lists(tokens: int, *, segments: bool, seed: int) -> tuple[list[int], list[int]]:
    """Block lists of a sequence at both ends. ``bench.block_lists`` counts blocks of its own size."""
    return block_lists.pair(
        tokens * block_lists.BLOCK_TOKENS // BLOCK_TOKENS, segments=segments, blocks=BLOCKS, seed=seed
    )


def naive(rank: KvRank, source: list[int], target: list[int]) -> CopyPlan:
    """A piece for each block and plane, as the lists come."""
    columns = [
        np.array([plane.offset + block * plane.stride for plane in rank.planes for block in blocks], dtype=np.int64)
        for blocks in (source, target)
    ]
    lengths = np.array([plane.bytes for plane in rank.planes for _ in source], dtype=np.int64)
    return CopyPlan(source=columns[0], target=columns[1], lengths=lengths)


class Moved(NamedTuple):
    """A sequence and the arm it moves by."""

    arm: Arm
    source: list[int]
    target: list[int]
    planner: Planner

    def plan(self) -> CopyPlan:
        """Its descriptors."""
        if self.arm.aligned:
            return self.planner.plan(self.source, self.target)
        return naive(layout(block_major=self.arm.block_major), self.source, self.target)


def moved(arm: Arm, tokens: int, seed: int) -> Moved:
    """A sequence of ``tokens`` tokens."""
    rank = layout(block_major=arm.block_major)
    source, target = lists(tokens, segments=arm.segments, seed=seed)
    if arm.fresh:
        source, target = [list(range(seed, seed + len(blocks))) for blocks in (source, target)]
    return Moved(arm, source, target, Planner(rank, rank))


def fill(view: np.ndarray) -> None:
    """Each word of a source's region holds its own number: every piece can be checked."""
    words = view[:REGION_BYTES].view(WORD)
    words[:] = np.arange(len(words), dtype=WORD)


def is_right(view: np.ndarray, plan: CopyPlan) -> bool:
    """Whether the target holds what the plan says."""
    words = view[:REGION_BYTES].view(WORD)
    for source, target, length in zip(plan.source, plan.target, plan.lengths, strict=True):
        here = words[target // 8 : (target + length) // 8]
        if not np.array_equal(here, np.arange(source // 8, (source + length) // 8, dtype=WORD)):
            return False
    return True
