"""Selection of free blocks, so that a sequence's blocks lie side by side in memory.

A free queue in order of reuse says which blocks are cheapest to lose. Handing out its first blocks scatters every
sequence over the whole cache, and a sequence that moves then travels in nearly as many pieces as it has blocks. Here
the first few blocks of the queue are *candidates*. Among them the best contiguous run is taken, beginning with the
block right behind the sequence's last.

Rules of the selection:

- Candidates for ``count`` blocks are the first ``count + WINDOW`` of the queue. A block further back is never taken.
- Of these, blocks whose content another request found while they lay in the queue (*hit* blocks) are candidates only
  among the first ``count + HIT_WINDOW``: a prefix that is used again and again keeps its place in the queue.
- A single block that extends nothing comes out of the run that holds the first candidate, so that the head moves on.
- Blocks that are not taken keep their order.

So a cached block may be lost up to ``WINDOW`` places earlier than by strict order, and another may outlive its turn.
Prefix hits are the same as long as no such block is asked for in between; docs/decisions/0012-segments.md has figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

#: How far to look beyond what strict order takes: more gives longer runs, costs time, and departs from the order.
WINDOW = 63
#: The same for blocks that were hit.
HIT_WINDOW = 15


def choose(candidates: Sequence[int], count: int, *, after: int = -1) -> list[int]:
    """Picks ``count`` of the candidates, in as few contiguous ascending runs as a quick look finds.

    Args:
        candidates: Ids of free blocks, the cheapest to lose first; at least ``count``.
        after: Last block of the sequence that grows: what follows it comes first. -1 for none.

    Returns:
        The ids in the order in which the sequence should use them.
    """
    left = set(candidates)
    chosen: list[int] = []
    following = after + 1
    while following in left and len(chosen) < count:
        left.discard(following)
        chosen.append(following)
        following += 1
    missing = count - len(chosen)
    if missing == len(left):
        return chosen + sorted(left)
    return chosen + _best_runs(candidates, left, missing) if missing else chosen


def _best_runs(candidates: Sequence[int], left: set[int], missing: int) -> list[int]:
    """The oldest run that is long enough; where none is, the longest ones until one is."""
    runs: list[tuple[int, int]] = []  # first block and length, the oldest first
    for first, length in _runs(candidates, left):
        if length >= missing:
            return list(range(first, first + missing))
        runs.append((first, length))
    chosen: list[int] = []
    while missing:
        fitting = next((run for run in runs if run[1] >= missing), None)
        first, length = fitting or max(runs, key=lambda run: run[1])
        runs.remove((first, length))
        chosen += range(first, first + min(length, missing))
        missing -= min(length, missing)
    return chosen


def _runs(candidates: Sequence[int], left: set[int]) -> Iterator[tuple[int, int]]:
    """Contiguous runs of ``left``, which is used up, in the order of their first candidate."""
    for block in candidates:
        if block not in left:
            continue
        left.remove(block)
        first, end = block - 1, block + 1
        while first in left:
            left.remove(first)
            first -= 1
        while end in left:
            left.remove(end)
            end += 1
        yield first + 1, end - first - 1


def runs(blocks: Iterable[int]) -> int:
    """Number of contiguous ascending runs in a block list: the fewest pieces that it can be copied in, per layer."""
    count, expected = 0, None
    for block in blocks:
        count += block != expected
        expected = block + 1
    return count
