"""Block lists of a sequence in a cache that has been in use for a while, with either free-block queue.

For figures of transfers: ``pair`` gives the block lists of a source, where the sequence came with its prompt and grew
among others, and of a target that sets blocks aside for it at once.
"""

from __future__ import annotations

import argparse
import random

from millrace.kvcache.pool import BlockPool
from millrace.kvcache.segment_pool import SegmentPool
from millrace.kvcache.segments import runs

BLOCK_TOKENS = 16
#: Tokens of a prompt that are computed in one step, and so get their blocks together.
CHUNK_TOKENS = 2048
#: Neighbours: sequences that come, grow and end beside the one that is looked at.
NEIGHBOURS = 16
CHURN = 40_000  # allocations before it comes


class UsedEngine:
    """The blocks of an engine under load: neighbours come with prompts, grow a block at a time in turn, and end."""

    def __init__(self, *, segments: bool, blocks: int, seed: int) -> None:
        self._pool: BlockPool | SegmentPool = (SegmentPool if segments else BlockPool)(blocks, caching=True)
        self._rng = random.Random(seed)
        self._neighbours: list[tuple[list[int], int]] = []  # blocks, and how many there will be
        self._names = 0
        self._mean = blocks // (3 * NEIGHBOURS)  # a third of the cache is in use, the rest waits for reuse

    def churn(self, allocations: int) -> None:
        """Lets the neighbours go on."""
        while allocations > 0:
            allocations -= self._step()

    def _step(self) -> int:
        if len(self._neighbours) < NEIGHBOURS:
            prompt = self._rng.randint(1, 2 * self._mean)
            blocks: list[int] = []
            self.extend(blocks, prompt)
            self._neighbours.append((blocks, prompt + self._rng.randint(1, 1 + prompt // 4)))
            return prompt
        index = self._rng.randrange(NEIGHBOURS)
        blocks, end = self._neighbours[index]
        if len(blocks) >= end:
            self._end(index)
            return 0
        self.extend(blocks, 1)
        return 1

    def _end(self, index: int) -> None:
        blocks, _ = self._neighbours.pop(index)
        for block in blocks[:-1]:  # the last one is not full
            self._names += 1
            self._pool.name(block, self._names)
        self._pool.release(blocks)

    def extend(self, blocks: list[int], count: int) -> None:
        """Gives a sequence more blocks."""
        if isinstance(self._pool, SegmentPool):
            blocks += self._pool.take(count, after=blocks[-1] if blocks else -1)
        else:
            blocks += self._pool.take(count)

    def running(self, tokens: int, *, output_share: float = 0.2) -> list[int]:
        """Blocks of a sequence of so many tokens, of which the last share was decoded one by one."""
        blocks: list[int] = []
        prompt = round(tokens * (1 - output_share))
        for end in [*range(CHUNK_TOKENS, prompt, CHUNK_TOKENS), prompt]:
            self.extend(blocks, -(-end // BLOCK_TOKENS) - len(blocks))
            self.churn(NEIGHBOURS)
        while len(blocks) * BLOCK_TOKENS < tokens:
            self.extend(blocks, 1)
            self.churn(NEIGHBOURS)
        return blocks

    def reserved(self, tokens: int) -> list[int]:
        """Blocks set aside at once for a sequence of so many tokens."""
        blocks: list[int] = []
        self.extend(blocks, -(-tokens // BLOCK_TOKENS))
        return blocks


def pair(tokens: int, *, segments: bool, blocks: int = 16_384, seed: int = 0) -> tuple[list[int], list[int]]:
    """Block lists of a sequence of ``tokens`` tokens at a source and a target, in the order of positions.

    Args:
        blocks: In each engine's cache, of BLOCK_TOKENS tokens.
    """
    source = UsedEngine(segments=segments, blocks=blocks, seed=2 * seed)
    target = UsedEngine(segments=segments, blocks=blocks, seed=2 * seed + 1)
    for engine in (source, target):
        engine.churn(max(CHURN, 3 * blocks))
    return source.running(tokens), target.reserved(tokens)


def aligned(source: list[int], target: list[int]) -> int:
    """Pieces per layer: a piece is contiguous on both sides."""
    steps = zip(source, source[1:], target, target[1:], strict=False)
    return 1 + sum(after != before + 1 or there != here + 1 for before, after, here, there in steps)


def main() -> int:
    """Prints runs at both ends and pieces after alignment, by length."""
    parser = argparse.ArgumentParser(prog="python -m bench block_lists", description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="*", default=[500, 1000, 2000, 4000, 8000, 16000])
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    print(f"{'queue':9} {'tokens':>7} {'blocks':>7} {'runs: source':>13} {'target':>7} {'pieces per layer':>17}")
    for segments in (False, True):
        for tokens in options.tokens:
            pairs = [pair(tokens, segments=segments, seed=seed) for seed in range(options.seeds)]
            source, target, pieces = (
                sum(values) / len(pairs)
                for values in zip(*[(runs(a), runs(b), aligned(a, b)) for a, b in pairs], strict=True)
            )
            name = "segments" if segments else "stock"
            print(f"{name:9} {tokens:7} {len(pairs[0][0]):7} {source:13.1f} {target:7.1f} {pieces:17.1f}", flush=True)
    return 0
