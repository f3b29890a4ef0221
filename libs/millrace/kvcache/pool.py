"""The block pool of one engine: which KV blocks are free, in which order they are reused, who shares them.

It follows the rules of vLLM's V1 pool: full blocks can be found by hash until they are reused; freed blocks
without a hash are reused first, last freed first; freed blocks with a hash are reused last, least recently freed
first. Block 0 is the null block and never handed out.

Memory grows with the blocks ever used, not with the size of the pool: a thousand simulated engines of 30,000 blocks
each cost nothing until they fill.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Blocks ``1..blocks_total`` with reference counts, reuse order and prefix index.

    Invariant: every block is either free (no references) or held, and ``free`` counts the free ones. The free queue
    reads, in order of reuse: ``_unnamed`` from its end, the blocks never used yet, ``_named`` from its start.
    """

    def __init__(self, blocks_total: int, *, caching: bool) -> None:
        """Args: blocks_total: usable blocks, the null block not counted. caching: whether a prefix index is kept."""
        self.blocks_total = blocks_total
        self.caching = caching
        self.free = blocks_total
        self._fresh = 1  # blocks from here on were never used
        self._references: list[int] = [1]  # by block id; the null block is always held
        self._hash_of: list[int | None] = [None]
        self._unnamed: list[int] = []
        self._named: OrderedDict[int, None] = OrderedDict()
        self._index: dict[int, int | dict[int, None]] = {}
        self._generations: dict[int, int] = {}  # of blocks whose generation was asked for

    def take(self, count: int) -> list[int]:
        """Hands out ``count`` blocks, forgetting what was cached in them. The caller has checked ``free``."""
        assert count <= self.free, f"{count} blocks wanted, {self.free} free"
        self.free -= count
        unnamed = self._unnamed
        if not count or count > len(unnamed):
            taken = [self._take_one() for _ in range(count)]
        else:
            taken = unnamed[: -count - 1 : -1]
            del unnamed[-count:]
            references = self._references
            for block in taken:
                references[block] = 1
        if self._generations:
            self._count_reuse(taken)
        return taken

    def generation(self, block: int) -> int:
        """Return the generation of a block's content. From the first call on, it rises whenever the block is handed out
        anew. Equal numbers mean that what was in the block is still there.
        """
        return self._generations.setdefault(block, 0)

    def generations(self, blocks: Iterable[int]) -> list[int]:
        """Return the generations of several blocks; see ``generation``."""
        known = self._generations.setdefault
        return [known(block, 0) for block in blocks]

    def _count_reuse(self, blocks: list[int]) -> None:
        generations = self._generations
        for block in blocks:
            if block in generations:
                generations[block] += 1

    def _take_one(self) -> int:
        if self._unnamed:
            block = self._unnamed.pop()
        elif self._fresh <= self.blocks_total:
            block = self._fresh
            self._fresh += 1
            self._references.append(1)
            self._hash_of.append(None)
            return block
        else:
            block, _ = self._named.popitem(last=False)
            self._forget(block)
        self._references[block] = 1
        return block

    def _forget(self, block: int) -> None:
        name = self._hash_of[block]
        assert name is not None
        self._hash_of[block] = None
        holders = self._index[name]
        if isinstance(holders, dict):
            del holders[block]
            if not holders:
                del self._index[name]
        elif holders == block:
            del self._index[name]

    def find(self, hashes: Sequence[int], count_max: int) -> list[int]:
        """Blocks that hold the longest cached prefix of ``hashes``, at most ``count_max``. Takes no reference."""
        found: list[int] = []
        index = self._index
        for name in hashes[:count_max]:
            holders = index.get(name)
            if holders is None:
                break
            found.append(next(iter(holders)) if isinstance(holders, dict) else holders)
        return found

    def unreferenced(self, blocks: Iterable[int]) -> int:
        """Count those of ``blocks`` that are in the free queue: taking a reference on them uses free blocks up."""
        references = self._references
        return sum(references[block] == 0 for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Takes one reference on each block, removing it from the free queue where it is there."""
        references = self._references
        for block in blocks:
            if references[block] == 0:
                del self._named[block]
                self.free -= 1
            references[block] += 1

    def name(self, block: int, block_hash: int) -> None:
        """Enters a full block into the prefix index. Several blocks may have the same hash; the first is found."""
        assert self._hash_of[block] is None, f"block {block} has a hash already"
        self._hash_of[block] = block_hash
        holders = self._index.get(block_hash)
        if holders is None:
            self._index[block_hash] = block
        elif isinstance(holders, dict):
            holders[block] = None
        else:
            self._index[block_hash] = {holders: None, block: None}

    def release(self, blocks: Sequence[int]) -> None:
        """Gives up one reference on each block of a sequence, given in the order of its tokens.

        The tail is reused before the head, so that a shared prefix survives longest.
        """
        references = self._references
        if not self.caching:  # then nothing is shared or named
            for block in blocks:
                references[block] = 0
            self.free += len(blocks)
            self._unnamed.extend(blocks)
            return
        hash_of = self._hash_of
        unnamed: list[int] = []
        for block in reversed(blocks):
            references[block] -= 1
            if references[block]:
                continue
            self.free += 1
            if hash_of[block] is None:
                unnamed.append(block)
            else:
                self._named[block] = None
        unnamed.reverse()
        self._unnamed.extend(unnamed)

    def free_order(self) -> list[int]:
        """All free blocks in the order in which they would be reused: for tests and people, O(free)."""
        fresh = range(self._fresh, self.blocks_total + 1)
        return [*reversed(self._unnamed), *fresh, *self._named]

    def check_invariants(self) -> None:
        order = self.free_order()
        assert len(order) == len(set(order)) == self.free, "free count and queue differ"
        assert all(self._references[block] == 0 for block in order if block < self._fresh), "a free block is held"
        assert sum(count == 0 for count in self._references) + self.blocks_total + 1 - self._fresh == self.free
        assert all(self._hash_of[block] is not None for block in self._named)
        for name, holders in self._index.items():
            for block in holders if isinstance(holders, dict) else (holders,):
                assert self._hash_of[block] == name, f"block {block} is indexed under a hash that it does not have"
