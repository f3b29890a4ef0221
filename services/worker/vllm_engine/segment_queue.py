"""A free-block queue for vLLM that hands out contiguous runs: a request moves in fewer pieces.

Which blocks it takes says ``millrace.kvcache.segments``; all else, the order of the queue included, is vLLM's own.
Installed by the scheduler where ``WorkerConfig.migration.segments`` is set, before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from millrace.kvcache import native
from millrace.kvcache.segments import HIT_WINDOW, WINDOW, choose
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

#: Key in VllmConfig.additional_config: whether to install it.
SEGMENTS = "millrace_segments"


class SegmentQueue(FreeKVCacheBlockQueue):
    """VLLM's queue with another choice in ``popleft`` and ``popleft_n``; used where native/ is not built.

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
        """Args: free: in order of reuse. blocks: all of the pool, by id. The windows: see kvcache/segments.py."""
        super().__init__(free)
        self.table: list[KVCacheBlock] | tuple[()] = ()
        self._blocks = blocks
        self._hit = bytearray(len(blocks))
        self._window = window
        self._hit_window = hit_window

    def popleft(self) -> KVCacheBlock:
        """Takes one block. Raises ValueError where none is free."""
        if not self.num_free_blocks:
            raise ValueError("No free blocks available")
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Takes ``n`` blocks, in the order in which the growing request should use them."""
        if n == 0:
            return []
        assert self.num_free_blocks >= n, f"{n} blocks wanted, {self.num_free_blocks} free"
        after = self.table[-1].block_id if self.table else -1
        return [self._take(block) for block in choose(self._candidates(n, after), n, after=after)]

    def _candidates(self, n: int, after: int) -> list[int]:
        """Ids that may be taken, in order of reuse; only the one that follows ``after`` where that is enough."""
        hit, hit_window, following = self._hit, n + self._hit_window, after + 1 if n == 1 and after >= 0 else -1
        ids: list[int] = []
        block: Any = self.fake_free_list_head
        for position in range(min(self.num_free_blocks, n + self._window)):
            block = block.next_free_block
            block_id = block.block_id
            if position < hit_window or not hit[block_id]:
                if block_id == following:
                    return [following]
                ids.append(block_id)
        return ids

    def _take(self, block_id: int) -> KVCacheBlock:
        block = self._blocks[block_id]
        super().remove(block)
        self._hit[block_id] = 0
        return block

    def remove(self, block: KVCacheBlock) -> None:
        """Takes out a block whose content a request has found: it counts as hit until it is reused."""
        super().remove(block)
        self._hit[block.block_id] = 1


class CompiledSegmentQueue(FreeKVCacheBlockQueue):
    """The same with order and choice in C++ (native/kvcache): vLLM's links between blocks are not used.

    Attributes:
        table: As SegmentQueue's.
    """

    def __init__(
        self,
        free: list[KVCacheBlock],
        blocks: list[KVCacheBlock],
        *,
        window: int = WINDOW,
        hit_window: int = HIT_WINDOW,
    ) -> None:
        """Args: as SegmentQueue's."""
        self._free = native.free_queue([block.block_id for block in free], len(blocks))
        self.table: list[KVCacheBlock] | tuple[()] = ()
        self._blocks = blocks
        self._window = window
        self._hit_window = hit_window

    @property
    def num_free_blocks(self) -> int:
        """Number of free blocks."""
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
    if isinstance(queue, SegmentQueue | CompiledSegmentQueue):
        queue.table = after
    blocks: list[KVCacheBlock] = pool.get_new_blocks(count)
    if isinstance(queue, SegmentQueue | CompiledSegmentQueue):
        queue.table = ()
    return blocks


def install(kv_cache_manager: Any, *, window: int = WINDOW, hit_window: int = HIT_WINDOW) -> None:
    """Puts a segment queue in the place of the pool's own, with the same blocks in the same order."""
    pool = kv_cache_manager.block_pool
    free = pool.free_block_queue.get_all_free_blocks()
    kind = CompiledSegmentQueue if native.AVAILABLE else SegmentQueue
    pool.free_block_queue = kind(free, pool.blocks, window=window, hit_window=hit_window)
    for manager in kv_cache_manager.coordinator.single_type_managers:
        manager.__class__ = telling(type(manager))
