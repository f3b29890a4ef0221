"""The planner: two block lists become the fewest pieces.

Both sides' lists are aligned at once: pairs (source block, target block) that follow each other on *both* sides become
one piece, in whatever order the lists name them. Planes of which every block is contiguous on both sides (block-major
layouts) count as one.

This file is the reference; ``native.py`` has the compiled one, equal to it piece by piece.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from millrace.contracts.kv import KvPlane, KvRank
from millrace.kvcopy import native
from millrace.kvcopy.copier_port import CopyPlan, Offsets

#: Within these, no sum or product passes 64 bits. native/kvcopy/include/planner.hpp has the same.
_BLOCK_IDS = 1 << 31
_STRIDE_MAX = 1 << 31
_OFFSET_MAX = 1 << 60


class Panel(msgspec.Struct, frozen=True, array_like=True):
    """Planes that are contiguous within each block on both sides: block ``b`` is ``bytes`` at ``offset + b * stride``.

    Attributes:
        source, target: Offset of block 0.
        source_stride, target_stride: From one block to the next.
        bytes: Of one block over the planes in it.
    """

    source: int
    source_stride: int
    target: int
    target_stride: int
    bytes: int

    @property
    def dense(self) -> bool:
        """Whether neighbouring blocks touch on both sides."""
        return self.bytes == self.source_stride == self.target_stride


class Planner:
    """Plans reads from one rank into another; keep one per peer.

    Raises ValueError: the two have different planes.
    """

    def __init__(self, source: KvRank, target: KvRank, *, compiled: bool = native.AVAILABLE) -> None:
        self._panels = panels(source.planes, target.planes)
        self._native = native.planner([msgspec.structs.astuple(panel) for panel in self._panels]) if compiled else None

    def plan(self, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> CopyPlan:
        """Pieces that copy ``source_blocks[i]`` to ``target_blocks[i]``; a target block is named at most once.

        Raises ValueError: the lists differ in length, or a block id is negative or 2**31 or more.
        """
        if self._native is not None:
            source, target, lengths = self._native.plan(source_blocks, target_blocks)
            return CopyPlan(source=source, target=target, lengths=lengths)
        return _plan(self._panels, _block_ids(source_blocks), _block_ids(target_blocks))


def plan(source: KvRank, source_blocks: Sequence[int], target: KvRank, target_blocks: Sequence[int]) -> CopyPlan:
    """One plan; see Planner for many."""
    return Planner(source, target).plan(source_blocks, target_blocks)


def panels(source: Sequence[KvPlane], target: Sequence[KvPlane]) -> list[Panel]:
    """Both sides' planes, pair by pair, those merged that are contiguous within each block on both sides.

    Raises ValueError: the planes differ in number or in bytes of a block, or one is malformed.
    """
    for plane in (*source, *target):
        if not (0 <= plane.offset <= _OFFSET_MAX and 1 <= plane.bytes <= plane.stride <= _STRIDE_MAX):
            raise ValueError(f"a plane is malformed: {plane}")
    if [plane.bytes for plane in source] != [plane.bytes for plane in target]:
        raise ValueError("the two regions have different planes; their fingerprints should have differed")
    merged: list[Panel] = []
    for here, there in sorted(zip(source, target, strict=True), key=lambda pair: pair[0].offset):
        panel = Panel(here.offset, here.stride, there.offset, there.stride, here.bytes)
        if merged and _continues(merged[-1], panel):
            before = merged.pop()
            panel = msgspec.structs.replace(before, bytes=before.bytes + panel.bytes)
        merged.append(panel)
    return merged


def _continues(before: Panel, panel: Panel) -> bool:
    return (before.source + before.bytes, before.source_stride, before.target + before.bytes, before.target_stride) == (
        panel.source,
        panel.source_stride,
        panel.target,
        panel.target_stride,
    )


def _block_ids(blocks: Sequence[int]) -> Offsets:
    ids = np.asarray(blocks, dtype=np.int64)
    wrong = ids[(ids < 0) | (ids >= _BLOCK_IDS)]
    if wrong.size:
        raise ValueError(f"block id {wrong[0]} is none")
    return ids


def _plan(layout: list[Panel], source: Offsets, target: Offsets) -> CopyPlan:
    if len(source) != len(target):
        raise ValueError(f"{len(source)} source blocks for {len(target)} target blocks")
    order = np.lexsort((source, target - source))
    source, target = source[order], target[order]
    starts, counts = _runs(source, target)
    pieces = [_pieces(panel, source, target, starts, counts) for panel in layout]
    columns = [np.concatenate(column) for column in zip(*pieces, strict=True)] or [np.empty(0, np.int64)] * 3
    return _merged(*columns)


def _runs(source: Offsets, target: Offsets) -> tuple[Offsets, Offsets]:
    """Index of the first pair of each run, and the pairs in it: consecutive block ids on both sides."""
    if not len(source):
        return source, source
    breaks = np.flatnonzero((np.diff(source) != 1) | (np.diff(target) != 1)) + 1
    starts = np.concatenate([[0], breaks]).astype(np.int64)
    return starts, np.diff(np.append(starts, len(source)))


def _pieces(panel: Panel, source: Offsets, target: Offsets, starts: Offsets, counts: Offsets) -> list[Offsets]:
    """Source offsets, target offsets and lengths of one panel's pieces."""
    if panel.dense:
        source, target = source[starts], target[starts]
        lengths = counts * panel.bytes
    else:
        lengths = np.full(len(source), panel.bytes, dtype=np.int64)
    return [panel.source + source * panel.source_stride, panel.target + target * panel.target_stride, lengths]


def _merged(source: Offsets, target: Offsets, lengths: Offsets) -> CopyPlan:
    """Joins neighbours that touch on both sides: a run that ends with its plane, where the next plane begins."""
    if not len(lengths):
        return CopyPlan(source=source, target=target, lengths=lengths)
    ends = (source + lengths)[:-1], (target + lengths)[:-1]
    starts = np.concatenate([[0], np.flatnonzero((ends[0] != source[1:]) | (ends[1] != target[1:])) + 1])
    return CopyPlan(source=source[starts], target=target[starts], lengths=np.add.reduceat(lengths, starts))
