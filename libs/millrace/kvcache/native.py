"""The compiled queue of free blocks, where built. The only place that imports ``millrace_native.kvcache``."""

from __future__ import annotations

#: Changes with the calls of FreeQueue; a build of another interface is of older or newer sources.
INTERFACE = 1

try:
    from millrace_native import kvcache as _module
except ImportError:  # not built here: the rules in Python do it
    AVAILABLE = False
else:
    #: Whether the compiled module is there.
    AVAILABLE = _module.INTERFACE == INTERFACE


def free_queue(order: list[int], total: int) -> _module.FreeQueue:
    """A queue of the blocks 0 to ``total - 1`` of which those of ``order`` are free, the cheapest to lose first.

    ``take(count, after, window, hit_window)`` hands out what ``segments.choose`` would of the first ``count + window``,
    without hit blocks beyond ``count + hit_window``; ``remove`` takes out a block whose content was found, which
    counts as hit until it is handed out; ``append`` and ``prepend`` put blocks to an end, in the order given;
    ``after(block)`` lists what comes behind a free block, or all for -1; ``count`` is how many are free.

    Raises (its methods):
        IndexError: no such block.
        RuntimeError: a block is put in that is free, or taken out that is not.
        ValueError: a take of more than are free.
    """
    return _module.FreeQueue(order, total)
