"""The planner: two block lists become the fewest pieces.

Both sides' lists are aligned at once: pairs (source block, target block) that follow each other on *both* sides become
one piece, in whatever order the lists name them. Planes of which every block is contiguous on both sides (block-major
layouts) count as one.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from millrace.contracts.kv import KvPlane, KvRank
from millrace.kvcopy.copier_port import CopyPlan
from millrace.native import kvcopy

#: Within these, no sum or product passes 64 bits. native/kvcopy/include/planner.hpp has the same.
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


class Planner:
    """Plans reads from one rank into another; keep one per peer.

    Raises ValueError: the two have different planes.
    """

    def __init__(self, source: KvRank, target: KvRank) -> None:
        merged = panels(source.planes, target.planes)
        self._native = kvcopy.Planner([msgspec.structs.astuple(panel) for panel in merged])

    def plan(self, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> CopyPlan:
        """Pieces that copy ``source_blocks[i]`` to ``target_blocks[i]``; a target block is named at most once.

        Raises ValueError: the lists differ in length, or a block id is negative or 2**31 or more.
        """
        source, target, lengths = self._native.plan(source_blocks, target_blocks)
        return CopyPlan(source=source, target=target, lengths=lengths)


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
