"""Budgets of the hot path; ``python -m bench --check`` looks at them.

Each path has two. **CPU time**: the ratio to an earlier commit's code, which serves the same requests in turn on the
same core (`bench.reference`), so that other load disturbs both alike. **Instructions**, counted by valgrind where it is
installed: the ratio to a calibration loop. Counts hardly vary between runs, but do not show cache misses.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence

import msgspec

from bench.instructions import SECONDS_MAX

#: Commit whose code the CPU time is compared with. Who makes the path dearer for a reason sets it and the counts anew.
REFERENCE = "091586d"
#: Share by which CPU time may be above the reference's, and instructions above their budget.
MARGIN, COUNTED_MARGIN = 0.05, 0.03
#: Pairs of processes at most; no further one is started once the budget holds.
PAIRS_MAX = 3
#: What makes a budget's bench count instructions.
COUNTED = ("--counted", "--requests", "100")
_RATIO = re.compile(r"ratio (\d+\.\d+)")


class Budget(msgspec.Struct, frozen=True):
    """Budget of one row of ``hot_path``.

    Attributes:
        words: Arguments of the bench.
        counted: Instructions of a request over those of a round of the calibration loop.
    """

    name: str
    words: tuple[str, ...]
    counted: float


class Verdict(msgspec.Struct, frozen=True):
    """Result for one budget.

    Attributes:
        word: ``ok``, ``lower`` (the budget is far above what it costs: set it anew) or ``SLOWER``.
        ratio: Measured; the lowest where several were.
    """

    word: str
    ratio: float


BUDGETS: tuple[Budget, ...] = (
    Budget("a short request, 2 instances", ("--instances", "2"), 0.747),
    Budget("a stream of 64 tokens, 2 instances", ("--instances", "2", "--tokens", "64", "--stream"), 0.816),
    Budget("a short request, 64 instances of one host", ("--instances", "64"), 1.094),
)


def judged(budget: Budget, measure: Callable[[Sequence[str]], float]) -> Verdict:
    """Judge the CPU time by the lowest ratio of some pairs of processes.

    Args:
        measure: Runs the bench with these words beside the reference.
    """
    lowest = float("inf")
    for _ in range(PAIRS_MAX):
        lowest = min(lowest, measure(budget.words))
        if lowest <= 1 + MARGIN:
            break
    return _verdict(lowest, 1.0, MARGIN)


def judged_by_count(budget: Budget, measure: Callable[[Sequence[str]], float]) -> Verdict:
    """Judge the instructions, which one process is enough for.

    Args:
        measure: Runs the bench with these words.
    """
    return _verdict(measure((*budget.words, *COUNTED)), budget.counted, COUNTED_MARGIN)


def _verdict(ratio: float, kept: float, margin: float) -> Verdict:
    if ratio > kept * (1 + margin):
        return Verdict("SLOWER", ratio)
    return Verdict("ok" if ratio * (1 + margin) >= kept else "lower", ratio)


def counted_ratio(words: Sequence[str]) -> float:
    """The ratio that a process of its own tells."""
    command = [sys.executable, "-m", "bench.hot_path", *words]
    told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=SECONDS_MAX).stdout
    found = _RATIO.search(told)
    assert found is not None, told
    return float(found[1])
