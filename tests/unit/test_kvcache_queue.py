"""The compiled queue of free blocks beside the rules in Python: the same blocks in the same order, whatever happens."""

from __future__ import annotations

import random

import pytest
from millrace.kvcache.segments import choose
from millrace.native import kvcache

BLOCKS = 200
WINDOW, HIT_WINDOW = 20, 5


class Listed:
    """The queue as a plain list."""

    def __init__(self, order: list[int]) -> None:
        self.order, self.hit = list(order), set[int]()

    def take(self, count: int, after: int) -> list[int]:
        candidates = [
            block
            for position, block in enumerate(self.order[: count + WINDOW])
            if position < count + HIT_WINDOW or block not in self.hit
        ]
        taken = choose(candidates, count, after=after) if count else []
        self.order = [block for block in self.order if block not in taken]
        self.hit.difference_update(taken)
        return taken

    def remove(self, block: int) -> None:
        self.order.remove(block)
        self.hit.add(block)


@pytest.mark.parametrize("seed", range(8))
def test_both_hand_out_the_same_blocks_and_keep_the_same_order(seed: int) -> None:
    rng = random.Random(seed)
    free = rng.sample(range(BLOCKS), BLOCKS - 3)
    listed, compiled = Listed(free), kvcache.FreeQueue(free, BLOCKS)
    held: list[list[int]] = []
    extended = 0
    for _ in range(2_000):
        choice = rng.random()
        if choice < 0.5:
            table = rng.choice(held) if held and rng.random() < 0.7 else []
            count = min(rng.choice((0, 1, 1, 1, 1, 2, 5, 12, 60)), len(listed.order))
            after = table[-1] if table else rng.choice((-1, -1, rng.randrange(BLOCKS), BLOCKS - 1, BLOCKS + 5))
            taken = compiled.take(count, after, WINDOW, HIT_WINDOW)
            assert taken == listed.take(count, after)
            extended += bool(taken) and taken[0] == after + 1
            held.append(table + taken)
            held = [other for other in held if other and other is not table]
        elif choice < 0.6 and listed.order:
            block = rng.choice(listed.order[:40])
            listed.remove(block)
            compiled.remove(block)
            held.append([block])
        elif held:
            blocks = held.pop(rng.randrange(len(held)))[::-1]
            if rng.random() < 0.2:
                listed.order[:0] = blocks
                compiled.prepend(blocks)
            else:
                listed.order += blocks
                compiled.append(blocks)
        assert compiled.after(-1) == listed.order
        assert compiled.count == len(listed.order)
    assert extended > 50


def test_what_comes_behind_a_free_block_is_listed_and_behind_a_held_one_nothing() -> None:
    queue = kvcache.FreeQueue([4, 2, 3, 1], 5)
    assert queue.after(2) == [3, 1]
    assert queue.after(1) == []
    assert queue.take(1, 3, 10, 10) == [4]
    assert queue.after(4) == []


def test_what_can_not_be_is_refused_and_changes_nothing() -> None:
    queue = kvcache.FreeQueue([4, 2, 3], 5)
    for refused, error in (
        (lambda: queue.append([2]), RuntimeError),
        (lambda: queue.prepend([2]), RuntimeError),
        (lambda: queue.remove(1), RuntimeError),
        (lambda: queue.remove(5), IndexError),
        (lambda: queue.remove(-1), IndexError),
        (lambda: queue.append([5]), IndexError),
        (lambda: queue.append([-1]), IndexError),
        (lambda: queue.append([1 << 40]), IndexError),
        (lambda: queue.after(5), IndexError),
        (lambda: queue.take(4, -1, 0, 0), ValueError),
        (lambda: queue.take(-1, -1, 0, 0), ValueError),
    ):
        with pytest.raises(error):
            refused()
    assert queue.after(-1) == [4, 2, 3]
    with pytest.raises(RuntimeError, match="free already"):
        kvcache.FreeQueue([1, 1], 5)
