"""A free-block queue for vLLM that hands out contiguous runs: a request moves in fewer pieces.

A free queue in order of reuse says which blocks are cheapest to lose. Handing out its first blocks scatters every
sequence over the whole cache. Here the first few blocks of the queue are *candidates*. Among them the best contiguous
run is taken, beginning with the block right behind the sequence's last. All else, the order of the queue included, is
vLLM's own.

Rules of the selection:

- Candidates for ``count`` blocks are the first ``count + WINDOW`` of the queue. A block further back is never taken.
- Of these, blocks whose content another request found while they lay in the queue (*hit* blocks) are candidates only
  among the first ``count + HIT_WINDOW``: a prefix that is used again and again keeps its place in the queue.
- A single block that extends nothing comes out of the run that holds the first candidate, so that the head moves on.
- Blocks that are not taken keep their order.

So a cached block may be lost up to ``WINDOW`` places earlier than by strict order, and another may outlive its turn.
Prefix hits are the same as long as no such block is asked for in between; docs/decisions/0012-segments.md has figures.

Installed by the scheduler where ``WorkerConfig.migration.segments`` is set, before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from millrace.native import kvcache
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

#: How far to look beyond what strict order takes: more gives longer runs, costs time, and departs from the order.
WINDOW = 63
#: The same for blocks that were hit.
HIT_WINDOW = 15
#: Key in VllmConfig.additional_config: whether to install it.
SEGMENTS = "millrace_segments"


class SegmentQueue(FreeKVCacheBlockQueue):
    """VLLM's queue with order and choice in C++ (native/kvcache): vLLM's links between blocks are not used.

    Attributes:
        table: Blocks of the request that is growing, while it is; empty otherwise. Set by ``telling`` managers.
    """

    def __init__(
        self,
        free: list[KVCacheBlock],
        blocks: list[KVCacheBlock],
        *,
        window: int = WINDOW,
        hit_window: int = HIT_WINDOW,
    ) -> None:
        """Args: free: in order of reuse. blocks: all of the pool, by id. The windows: see above."""
        self._free = kvcache.FreeQueue([block.block_id for block in free], len(blocks))
        self.table: list[KVCacheBlock] | tuple[()] = ()
        self._blocks = blocks
        self._window = window
        self._hit_window = hit_window

    @property
    def num_free_blocks(self) -> int:
        return self._free.count

    def popleft(self) -> KVCacheBlock:
        """Takes one block. Raises ValueError where none is free."""
        if not self._free.count:
            raise ValueError("No free blocks available")
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Takes ``n`` blocks, in the order in which the growing request should use them."""
        if n == 0:
            return []
        assert self._free.count >= n, f"{n} blocks wanted, {self._free.count} free"
        table, blocks = self.table, self._blocks
        after = table[-1].block_id if table else -1
        return [blocks[block_id] for block_id in self._free.take(n, after, self._window, self._hit_window)]

    def remove(self, block: KVCacheBlock) -> None:
        """Takes out a block whose content a request has found: it counts as hit until it is reused."""
        self._free.remove(block.block_id)

    def append(self, block: KVCacheBlock) -> None:
        """Puts it behind all others."""
        self._free.append([block.block_id])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        """Puts them behind all others, in this order."""
        self._free.append([block.block_id for block in blocks])

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        """Puts them before all others, in this order."""
        self._free.prepend([block.block_id for block in blocks])

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """In order of reuse."""
        return list(self.iter_blocks_after(None))

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        """Those behind a free block in order of reuse, as they are when the first is asked for; all for None."""
        for block_id in self._free.after(-1 if cursor is None else cursor.block_id):
            yield self._blocks[block_id]


def telling(kind: Any) -> type:
    """A KV-cache manager class that besides tells the queue whose blocks it is about to extend."""

    class Telling(kind):
        def allocate_new_blocks(self, request_id: str, *args: Any) -> Any:
            queue = self.block_pool.free_block_queue
            queue.table = self.req_to_blocks[request_id]
            blocks = super().allocate_new_blocks(request_id, *args)
            queue.table = ()
            return blocks

        def allocate_external_computed_blocks(self, request_id: str, *args: Any, **kwargs: Any) -> None:
            queue = self.block_pool.free_block_queue
            queue.table = self.req_to_blocks[request_id]
            super().allocate_external_computed_blocks(request_id, *args, **kwargs)
            queue.table = ()

    return Telling


def new_blocks(pool: Any, count: int, *, after: list[KVCacheBlock]) -> list[KVCacheBlock]:
    """Blocks that are to follow these in a block list, from whichever queue the pool has."""
    queue = pool.free_block_queue
    if isinstance(queue, SegmentQueue):
        queue.table = after
    blocks: list[KVCacheBlock] = pool.get_new_blocks(count)
    if isinstance(queue, SegmentQueue):
        queue.table = ()
    return blocks


def install(kv_cache_manager: Any, *, window: int = WINDOW, hit_window: int = HIT_WINDOW) -> None:
    """Puts a segment queue in the place of the pool's own, with the same blocks in the same order."""
    pool = kv_cache_manager.block_pool
    free = pool.free_block_queue.get_all_free_blocks()
    pool.free_block_queue = SegmentQueue(free, pool.blocks, window=window, hit_window=hit_window)
    for manager in kv_cache_manager.coordinator.single_type_managers:
        manager.__class__ = telling(type(manager))
