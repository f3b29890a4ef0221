"""The compiled queue of free blocks beside the rules in Python: the same blocks in the same order, whatever happens."""

import random
from collections.abc import Iterator, Sequence

import pytest
from millrace.native import kvcache

BLOCKS = 200
WINDOW, HIT_WINDOW = 20, 5


def choose(candidates: Sequence[int], count: int, *, after: int = -1) -> list[int]:
    """The rules of services/worker/vllm_engine/segment_queue.py in Python."""
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
