"""The segment queue in vLLM's own block pool, beside the queue that vLLM has: the same blocks, other neighbours.

Which blocks it chooses is tested in tests/unit/test_kvcache_queue.py.
"""

import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from services.worker.vllm_engine.segment_queue import SegmentQueue, install, new_blocks

BLOCKS = 300


def pool(kind: type[SegmentQueue] | None = None, *, window: int | None = None) -> BlockPool:
    """A pool with prefix caching, its queue replaced where a kind is given."""
    made = BlockPool(BLOCKS, True, 32)
    if kind is not None:
        free = made.free_block_queue.get_all_free_blocks()
        windows: dict[str, int] = {} if window is None else {"window": window, "hit_window": window}
        made.free_block_queue = kind(free, made.blocks, **windows)
    return made


def free_ids(made: BlockPool) -> list[int]:
    """Ids in order of reuse."""
    return [block.block_id for block in made.free_block_queue.get_all_free_blocks()]


class Requests:
    """Requests that grow, share prefixes, end and are preempted at random; the same for a seed, whatever the pool."""

    def __init__(self, made: BlockPool, seed: int) -> None:
        self.pool, self.rng = made, random.Random(seed)
        self.tables: dict[int, list[KVCacheBlock]] = {}
        self.contents: dict[int, list[Any]] = {}
        self.hits: list[int] = []
        self.last_runs: list[int] = []
        self._number = 0

    def step(self) -> None:
        """One of: a request comes, grows, or ends."""
        choice = self.rng.random()
        if choice < 0.12 and len(self.tables) < 12:
            self.arrive()
        elif choice < 0.9 and self.tables:
            self.grow(self.rng.choice(list(self.tables)), 1)
        elif self.tables:
            self.end(self.rng.choice(list(self.tables)))

    def arrive(self) -> None:
        """A new request, which finds what is cached of its prefix."""
        self._number += 1
        prefix = self.rng.randrange(5)
        length, own = self.rng.randint(2, 12), self.rng.randint(1, 10)
        content = [("prefix", prefix, position) for position in range(length)]
        self.contents[self._number], self.tables[self._number] = content, []
        found = []
        for name in content:
            block = self.pool.cached_block_hash_to_block.get_one_block(name)
            if block is None:
                break
            found.append(block)
        self.pool.touch(found)
        self.hits.append(len(found))
        self.tables[self._number] = found
        self.grow(self._number, length - len(found) + own)

    def grow(self, request: int, count: int) -> None:
        """Gives a request blocks, from others that end where there are too few."""
        while self.pool.get_num_free_blocks() < count:
            self.end(next(iter(self.tables)) if next(iter(self.tables)) != request else list(self.tables)[-1])
            if request not in self.tables:
                return
        table = self.tables[request]
        table += new_blocks(self.pool, count, after=table)

    def end(self, request: int) -> None:
        """Caches all but the last block and frees the lot."""
        table, content = self.tables.pop(request), self.contents.pop(request)
        self.last_runs.append(sum(b.block_id != a.block_id + 1 for a, b in pairwise(table)))
        for position, block in enumerate(table[:-1]):
            if block.block_hash is None:
                name = content[position] if position < len(content) else ("own", request, position)
                self.pool._insert_block_hash(name, block, num_tokens=32)
        self.pool.free_blocks(reversed(table))


def check(made: BlockPool) -> None:
    """Counts and order of the queue agree with the blocks' references."""
    ids = free_ids(made)
    assert len(ids) == len(set(ids)) == made.get_num_free_blocks() == made.free_block_queue.num_free_blocks
    assert set(ids) == {block.block_id for block in made.blocks if block.ref_cnt == 0 and not block.is_null}


@pytest.mark.parametrize("seed", range(3))
def test_without_looking_ahead_the_same_blocks_are_lost_and_the_same_prefixes_found(seed: int) -> None:
    stock, segments = Requests(pool(), seed), Requests(pool(SegmentQueue, window=0), seed)
    for _ in range(600):
        stock.step()
        segments.step()
        check(segments.pool)
        assert segments.pool.get_num_free_blocks() == stock.pool.get_num_free_blocks()
        assert segments.hits == stock.hits
        assert len(segments.pool.cached_block_hash_to_block) == len(stock.pool.cached_block_hash_to_block)
    assert sum(stock.hits) > 200


def test_requests_lie_in_far_fewer_runs_than_with_vllms_own_queue() -> None:
    stock, segments = Requests(pool(), 1), Requests(pool(SegmentQueue), 1)
    for _ in range(3000):
        stock.step()
        segments.step()
    late = slice(len(stock.last_runs) // 2, None)
    assert sum(segments.last_runs[late]) * 2 < sum(stock.last_runs[late])


def test_every_call_of_the_queue_does_what_vllms_own_does() -> None:
    made = pool(SegmentQueue)
    queue = made.free_block_queue
    first = queue.popleft()
    assert first.block_id == 1
    queue.remove(made.blocks[5])
    assert queue.popleft_n(0) == []
    assert [block.block_id for block in queue.popleft_n(3)] == [2, 3, 4]
    queue.append(made.blocks[5])
    queue.append_n([made.blocks[3], made.blocks[2]])
    queue.prepend_n([made.blocks[4], first])
    assert free_ids(made)[:3] == [4, 1, 6]
    assert free_ids(made)[-3:] == [5, 3, 2]
    assert [block.block_id for block in queue.iter_blocks_after(made.blocks[5])] == [3, 2]
    assert queue.num_free_blocks == BLOCKS - 1
    with pytest.raises(AssertionError, match="wanted"):
        queue.popleft_n(BLOCKS)
    queue.popleft_n(BLOCKS - 1)
    with pytest.raises(ValueError, match="No free blocks"):
        queue.popleft()


def test_a_block_that_was_hit_waits_for_its_turn() -> None:
    blocks = pool().blocks
    queue = SegmentQueue([blocks[7], blocks[2]], blocks, window=5, hit_window=0)
    queue.table = [blocks[1]]
    assert queue.popleft() is blocks[2], "the next behind the table's last"
    queue.append(blocks[2])
    queue.remove(blocks[2])
    queue.append(blocks[2])
    assert queue.popleft() is blocks[7]


def test_the_queue_is_installed_with_the_same_blocks() -> None:
    made = pool()
    before = free_ids(made)
    install(SimpleNamespace(block_pool=made, coordinator=SimpleNamespace(single_type_managers=[])))
    assert isinstance(made.free_block_queue, SegmentQueue)
    assert free_ids(made) == before
