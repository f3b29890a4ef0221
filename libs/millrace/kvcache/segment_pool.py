"""A block pool that hands out contiguous runs, as vLLM's does with the segment queue of services/worker in it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice

from millrace.kvcache.pool import BlockPool
from millrace.kvcache.segments import HIT_WINDOW, WINDOW, choose


class SegmentPool(BlockPool):
    """BlockPool with another choice among the first free blocks (segments.py); their order is the same.

    Attributes:
        window, hit_window: How far to look; of the class, for figures that vary them.
    """

    __slots__ = ("_hit",)
    window = WINDOW
    hit_window = HIT_WINDOW

    def __init__(self, blocks_total: int, *, caching: bool) -> None:
        super().__init__(blocks_total, caching=caching)
        self._hit: set[int] = set()  # found by content while they were free, and not reused since

    def take(self, count: int, *, after: int = -1) -> list[int]:
        """Hands out ``count`` blocks, in the order in which the sequence that ends with ``after`` should use them."""
        assert count <= self.free, f"{count} blocks wanted, {self.free} free"
        if not count:
            return []
        chosen = choose(self._candidates(count), count, after=after)
        for block in chosen:
            self._take(block)
        self.free -= count
        self._hit.difference_update(chosen)
        if self._generations:
            self._count_reuse(chosen)
        return chosen

    def _candidates(self, count: int) -> list[int]:
        fresh = range(self._fresh, self.blocks_total + 1)
        first = list(islice(chain(reversed(self._unnamed), fresh, self._named), count + self.window))
        near = count + self.hit_window
        return first[:near] + [block for block in first[near:] if block not in self._hit]

    def _take(self, block: int) -> None:
        if block >= self._fresh:
            # Blocks never used are one run at its end, and runs are used from their beginning: they go in order.
            assert block == self._fresh
            self._fresh += 1
            self._references.append(1)
            self._hash_of.append(None)
            return
        if self._hash_of[block] is None:
            self._unnamed.remove(block)
        else:
            del self._named[block]
            self._forget(block)
        self._references[block] = 1

    def share(self, blocks: Iterable[int]) -> None:
        """As BlockPool's; a free block that is shared counts as hit until it is reused."""
        shared = list(blocks)
        self._hit.update(block for block in shared if self._references[block] == 0)
        super().share(shared)
