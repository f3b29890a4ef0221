"""CPU-time budgets of the hot path, as ratios to a calibration loop; ``python -m bench --check`` looks at them.

Other load on the machine only raises a ratio (0.93 at load 7, 1.1 to 1.5 at load 14, the same code on two cores): so
the lowest of several processes counts, and a budget that is overstepped while the machine is busy is not judged. On a
machine that is not, one that is a tenth above its budget is slower code.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence

import msgspec

#: Share by which a ratio may be above its budget.
MARGIN = 0.1
#: Processes of one budget at most; no further one is started once the budget holds.
PROCESSES_MAX = 5
_RATIO = re.compile(r"ratio (\d+\.\d+)")


class Budget(msgspec.Struct, frozen=True):
    """Budget of one row of ``hot_path``.

    Attributes:
        words: Arguments of the bench.
        ratio: Lowest that was seen.
    """

    name: str
    words: tuple[str, ...]
    ratio: float


class Verdict(msgspec.Struct, frozen=True):
    """Result for one budget.

    Attributes:
        word: ``ok``, ``lower`` (the budget is far above what it costs: set it anew), ``SLOWER``, or ``busy`` where that
            may be other load.
        ratio: Lowest that was measured.
    """

    word: str
    ratio: float


BUDGETS: tuple[Budget, ...] = (
    Budget("a short request, 2 instances", ("--instances", "2", "--requests", "1000"), 0.856),
    Budget(
        "a stream of 64 tokens, 2 instances",
        ("--instances", "2", "--requests", "400", "--tokens", "64", "--stream"),
        0.871,
    ),
    Budget("a short request, 64 instances of one host", ("--instances", "64", "--requests", "300"), 1.574),
)


def judged(budget: Budget, measure: Callable[[Sequence[str]], float], *, busy: bool) -> Verdict:
    """Compare a budget with the lowest ratio of some processes.

    Args:
        measure: Runs the bench with these words in a process of its own.
        busy: Whether other load takes the machine's cores.
    """
    lowest, highest = float("inf"), budget.ratio * (1 + MARGIN)
    for _ in range(PROCESSES_MAX):
        lowest = min(lowest, measure(budget.words))
        if lowest <= highest:
            break
    if lowest > highest:
        return Verdict("busy" if busy else "SLOWER", lowest)
    return Verdict("ok" if lowest * (1 + MARGIN) >= budget.ratio else "lower", lowest)


def is_busy() -> bool:
    """Whether more processes want to run than there are cores."""
    return os.getloadavg()[0] > len(os.sched_getaffinity(0))


def measured_ratio(words: Sequence[str]) -> float:
    """The ratio that a process of its own tells."""
    command = [sys.executable, "-m", "bench.hot_path", *words]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    found = _RATIO.search(told)
    assert found is not None, told
    return float(found[1])
