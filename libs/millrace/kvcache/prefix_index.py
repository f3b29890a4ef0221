"""Mirror of an engine's prefix cache, kept outside the engine: hashes of the blocks that its pool is believed to hold.

An engine keeps a computed block until its memory is needed for another. Unused blocks are overwritten in the
order in which they were left; of one sequence, the last block goes first. The mirror follows from what a router knows
without asking: which prompts were sent there, how far they are computed, when they ended, and how many blocks are free.
Where the mirror is wrong, it claims too much, because blocks of unknown content lie between. Whoever learns what was
really found therefore tells the mirror (``disprove``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Holding:
    """One sequence's prompt in an engine, block by block.

    Attributes:
        hashes: Chain hashes of its full blocks.
        hits: So many of them were believed to be there when it was placed.
        stamps: When each of these had been left; 0 where a sequence held it, or would.
        computed: So many of them are in the cache.
    """

    hashes: Sequence[int]
    hits: int
    stamps: Sequence[int]
    computed: int = 0


class PrefixIndex:
    """Hashes of an engine's cached blocks, as far as they are known."""

    def __init__(self) -> None:
        self._held: dict[int, int] = {}  # computed, and in use by so many sequences
        self._coming: dict[int, int] = {}  # to be computed, or found, by so many sequences
        self._left: OrderedDict[int, int] = OrderedDict()  # computed and unused, with when it was left
        self._stamp = 0

    def __len__(self) -> int:
        return len(self._held) + len(self._left)

    def find(self, hashes: Sequence[int], *, coming: bool) -> int:
        """Length of the longest known prefix, blocks.

        Args:
            hashes: Of successive blocks from the prompt's first on.
            coming: Whether a block counts that a sequence placed before will have computed by then.
        """
        held, left, promised = self._held, self._left, self._coming if coming else {}
        for index, block in enumerate(hashes):
            if block not in left and block not in held and block not in promised:
                return index
        return len(hashes)

    def expect(self, hashes: Sequence[int], *, coming: bool) -> Holding:
        """A sequence with this prompt was placed."""
        hits = self.find(hashes, coming=coming)
        left, promised = self._left, self._coming
        holding = Holding(hashes, hits, [left.get(block, 0) for block in hashes[:hits]])
        for block in hashes:
            promised[block] = promised.get(block, 0) + 1
        return holding

    def compute(self, holding: Holding, blocks: int) -> None:
        """Its first ``blocks`` blocks are computed, or were found, and it uses them."""
        held, left = self._held, self._left
        for block in holding.hashes[holding.computed : blocks]:
            _less(self._coming, block)
            left.pop(block, None)
            held[block] = held.get(block, 0) + 1
        holding.computed = max(holding.computed, min(blocks, len(holding.hashes)))

    def release(self, holding: Holding, further: Sequence[int] = ()) -> None:
        """It is gone from the engine: what it computed is left there, what it did not compute never comes.

        Args: further: hashes of blocks behind its prompt, which it filled by decoding.
        """
        for block in holding.hashes[holding.computed :]:
            _less(self._coming, block)
        if further:
            self.leave(further)
        for block in reversed(holding.hashes[: holding.computed]):
            if _less(self._held, block):
                self._put(block)
        holding.computed = 0
        holding.hashes = ()

    def leave(self, hashes: Sequence[int]) -> None:
        """Blocks were filled and are unused."""
        for block in reversed(hashes):
            if block not in self._held:
                self._left.pop(block, None)
                self._put(block)

    def shrink(self, blocks_free: int) -> None:
        """Number of unused blocks: no more than these can hold what was left."""
        while len(self._left) > blocks_free:
            self._left.popitem(last=False)

    def disprove(self, holding: Holding, hits: int) -> int:
        """Only ``hits`` blocks were found where more were believed to be there: the next one, and all that had been
        left before it, are gone. Returns how many were dropped.
        """
        stamp = holding.stamps[hits] if hits < len(holding.stamps) else 0
        before = len(self._left)
        while self._left and next(iter(self._left.values())) <= stamp:
            self._left.popitem(last=False)
        return before - len(self._left)

    def _put(self, block: int) -> None:
        self._stamp += 1
        self._left[block] = self._stamp

    def check_invariants(self) -> None:
        assert not self._held.keys() & self._left.keys(), "a block is in use and left"
        assert all(count > 0 for counts in (self._held, self._coming) for count in counts.values())
        stamps = list(self._left.values())
        assert stamps == sorted(stamps), "blocks are out of order"


def _less(counts: dict[int, int], block: int) -> bool:
    """One less; True where that was the last one."""
    count = counts.get(block, 0) - 1
    if count > 0:
        counts[block] = count
        return False
    counts.pop(block, None)
    return True
