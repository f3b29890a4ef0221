"""Compiled from native/kvcache."""

INTERFACE: int

class FreeQueue:
    """A queue of the blocks 0 to ``total - 1`` of which those of ``order`` are free, the cheapest to lose first.

    ``take`` hands out what ``segments.choose`` would of the first ``count + window``, without hit blocks beyond
    ``count + hit_window``; ``remove`` takes out a block whose content was found, which counts as hit until it is handed
    out; ``append`` and ``prepend`` put blocks to an end, in the order given; ``after(block)`` lists what comes behind a
    free block, or all for -1; ``count`` is how many are free.

    Raises (its methods):
        IndexError: no such block.
        RuntimeError: a block is put in that is free, or taken out that is not.
        ValueError: a take of more than are free.
    """

    def __init__(self, order: list[int], total: int, /) -> None: ...
    def take(self, count: int, after: int, window: int, hit_window: int, /) -> list[int]: ...
    def remove(self, block: int, /) -> None: ...
    def append(self, blocks: list[int], /) -> None: ...
    def prepend(self, blocks: list[int], /) -> None: ...
    def after(self, block: int, /) -> list[int]: ...
    @property
    def count(self) -> int: ...
