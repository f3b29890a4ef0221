"""The best partition of all lengths and all instances into stages.

A partition is a list of (i, j, d): the bins between cut i and cut j on d instances.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from millrace.policies.stages.objectives import StageCosts
from millrace.policies.stages.statistics import Array

Part = tuple[int, int, int]


def total(costs: StageCosts, parts: Sequence[Part]) -> float:
    """Value of the objective."""
    return float(sum(costs.cost[i, j, d] + (costs.cut[i] if i else 0.0) for i, j, d in parts))


def exact(costs: StageCosts) -> list[Part] | None:
    """The best partition, by dynamic programming over (instances, cut) without the number of stages.

    ``f[j, e] = min over i < j and d of f[i, e − d] + cost[i, j, d] + cut[i]``: the number of stages never enters the
    cost, so it need not be a dimension. O(E² J²), vectorised over i and e. Each stage has an
    instance, so e' = e does not occur.

    Returns:
        None where no partition keeps the constraints.
    """
    last, instances = costs.cost.shape[0] - 1, costs.instances
    cut = costs.cut.copy()
    cut[0] = 0.0
    best = np.full((last + 1, instances + 1), np.inf)
    best[0, 0] = 0.0
    for j in range(1, last + 1):
        steps = costs.cost[:j, j, :] + cut[:j, None]
        row = best[j]
        for d in np.flatnonzero(np.isfinite(steps).any(axis=0)):
            reached = (best[:j, : instances + 1 - d] + steps[:, d, None]).min(axis=0)
            np.minimum(row[d:], reached, out=row[d:])
    return _traced(costs.cost, cut, best)


def _traced(cost: Array, cut: Array, best: Array) -> list[Part] | None:
    j, e = best.shape[0] - 1, best.shape[1] - 1
    if not math.isfinite(best[j, e]):
        return None
    parts: list[Part] = []
    while j:
        counts = np.arange(1, e + 1)
        reached = best[:j, e - counts] + cost[:j, j, 1 : e + 1] + cut[:j, None]
        i, k = np.unravel_index(int(np.argmin(reached)), reached.shape)
        parts.append((int(i), j, int(counts[k])))
        j, e = int(i), e - int(counts[k])
    return parts[::-1]
