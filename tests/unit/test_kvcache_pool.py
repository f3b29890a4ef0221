"""The block pool: who holds blocks, and in which order free ones are reused."""

import random

import pytest
from millrace.kvcache.chain import chain_hash, extend_chain
from millrace.kvcache.pool import BlockPool


def test_taking_more_than_is_free_is_a_bug() -> None:
    pool = BlockPool(2, caching=True)
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 free"):
        pool.take(3)


def test_two_blocks_of_equal_content_both_stay_and_the_first_is_found() -> None:
    pool = BlockPool(4, caching=True)
    first, second = pool.take(2)
    pool.name(first, 11)
    pool.name(second, 11)
    assert pool.find([11], 1) == [first]
    pool.release([first])
    pool.take(3)  # reuses the first one too
    assert pool.find([11], 1) == [second]


@pytest.mark.parametrize("seed", range(10))
def test_nothing_is_lost_or_held_twice_under_random_use(seed: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(40, caching=True)
    held: list[list[int]] = []
    for _ in range(400):
        if held and (rng.random() < 0.5 or pool.free < 5):
            pool.release(held.pop(rng.randrange(len(held))))
        else:
            hashes = [rng.randrange(6) * 10 + depth for depth in range(rng.randrange(1, 5))]
            found = pool.find(hashes, len(hashes))
            pool.share(found)
            fresh = pool.take(min(len(hashes) - len(found), pool.free))
            for block, name in zip(fresh, hashes[len(found) :], strict=False):
                pool.name(block, name)
            held.append(found + fresh)
        pool.check_invariants()


def test_a_chain_hash_depends_on_everything_before_and_covers_full_blocks_only() -> None:
    hashes: list[int] = []
    extend_chain(hashes, list(range(10)), 4)
    assert len(hashes) == 2
    other: list[int] = []
    extend_chain(other, [99, *range(1, 10)], 4)
    assert other[1] != hashes[1]
    extend_chain(hashes, list(range(12)), 4)
    assert hashes[2] == chain_hash(hashes[1], [8, 9, 10, 11])
