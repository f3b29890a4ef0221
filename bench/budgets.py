"""Budgets of the hot path; ``python -m bench --check`` looks at them.

Counted are the instructions of a request, by valgrind where it is installed, beside those of an earlier commit's code
(`bench.reference`). Counts hardly vary between runs, whatever else runs, but do not show cache misses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

#: Commit whose code the present one is compared with. Who makes the path dearer for a reason sets it anew.
REFERENCE = "d5c0bffb"
#: Share by which instructions may be above the reference's.
MARGIN = 0.03


class Budget(msgspec.Struct, frozen=True):
    """Budget of one row of ``hot_path``; ``words`` are arguments of the bench."""

    name: str
    words: tuple[str, ...]


class Verdict(msgspec.Struct, frozen=True):
    """Result for one budget.

    Attributes:
        word: ``ok``, ``lower`` (it costs far less than at the reference: set that anew) or ``DEARER``.
        ratio: Measured.
    """

    word: str
    ratio: float


BUDGETS: tuple[Budget, ...] = (
    Budget("a short request, 2 instances", ("--instances", "2")),
    Budget("a stream of 64 tokens, 2 instances", ("--instances", "2", "--tokens", "64", "--stream")),
    Budget("a short request, 64 instances of one host", ("--instances", "64")),
)


def judged(budget: Budget, measure: Callable[[Sequence[str]], float]) -> Verdict:
    """Judge a budget.

    Args:
        measure: Runs the bench with these words beside the reference.
    """
    ratio = measure(budget.words)
    if ratio > 1 + MARGIN:
        return Verdict("DEARER", ratio)
    return Verdict("ok" if ratio * (1 + MARGIN) >= 1 else "lower", ratio)
