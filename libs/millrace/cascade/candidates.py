"""Choice of what a planner simulates: too many designs thinned out, and GPUs moved between tiers. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np

Found = TypeVar("Found")


def shifts(gpus: Sequence[int], shares: Sequence[float]) -> Iterator[list[int]]:
    """Other divisions of the GPUs: 8, 4, 2 or 1 of one tier's go to another one that is reached."""
    reached = [tier for tier, share in enumerate(shares) if share > 0]
    for count, source, target in itertools.product((8, 4, 2, 1), reached, reached):
        if source != target and gpus[source] > count:
            given = list(gpus)
            given[source] -= count
            given[target] += count
            yield given


def thinned(found: list[Found], most: int) -> list[Found]:
    """At most so many, evenly spaced."""
    if len(found) <= most:
        return found
    return [found[position] for position in np.unique(np.linspace(0, len(found) - 1, most).round().astype(int))]
