"""The paper's heuristic search: a chain with one instance per stage, then greedy merges.

Source: CascadeInfer, section 4.2.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import replace

import numpy as np
from millrace.policies.stages.objectives import StageCosts
from millrace.policies.stages.search import Part


def chain(costs: StageCosts) -> list[Part] | None:
    """One instance per stage; where there are more instances than tiers, each tier is a stage and the rest are spread.

    The paper's first phase. It leaves open what to do with more instances than tiers: here one instance after the
    other joins the stage where it reduces the cost most.

    Returns:
        None where no chain keeps the constraints.
    """
    last, instances = costs.cost.shape[0] - 1, costs.instances
    stages = min(instances, last)
    single = costs.cost[:, :, 1] + np.where(np.arange(last + 1) > 0, costs.cut, 0.0)[:, None]
    best, origin = np.full(last + 1, np.inf), np.zeros((stages + 1, last + 1), dtype=np.intp)
    best[0] = 0.0
    for s in range(1, stages + 1):
        reached = best[:, None] + single
        origin[s] = reached.argmin(axis=0)
        best = reached.min(axis=0)
    if not math.isfinite(best[last]):
        return None
    parts: list[Part] = []
    j = last
    for s in range(stages, 0, -1):
        i = int(origin[s, j])
        parts.append((i, j, 1))
        j = i
    return _spread(costs, parts[::-1], instances - stages)


def _spread(costs: StageCosts, parts: list[Part], extra: int) -> list[Part]:
    """Gives further instances to the stages whose cost they reduce most."""
    if not extra:
        return parts
    heap = [(_less(costs, part), index) for index, part in enumerate(parts)]
    heapq.heapify(heap)
    for _ in range(extra):
        _, index = heapq.heappop(heap)
        i, j, d = parts[index]
        parts[index] = (i, j, d + 1)
        heapq.heappush(heap, (_less(costs, parts[index]), index))
    return parts


def _less(costs: StageCosts, part: Part) -> float:
    """Change of the cost by one more instance; negative."""
    i, j, d = part
    if d >= costs.instances:
        return 0.0
    return float(costs.cost[i, j, d + 1] - costs.cost[i, j, d])


def two_phase(costs: StageCosts) -> list[Part] | None:
    """The paper's heuristic: a chain, then greedy merges of neighbours, the highest gain first.

    The paper has no constraints. Here stages that violate one cost much, so that they are merged first; the result may
    still violate one.

    Returns:
        None where there is no chain at all.

    Source: CascadeInfer, section 4.2.
    """
    costs = _repairable(costs)
    started = chain(costs)
    if started is None:
        return None
    parts: dict[int, Part] = dict(enumerate(started))
    right = {k: k + 1 for k in range(len(started) - 1)}
    left = {after: before for before, after in right.items()}
    heap = [(-_gain(costs, parts[k], parts[k + 1]), k, k + 1, parts[k], parts[k + 1]) for k in right]
    heapq.heapify(heap)
    while heap:
        negative, a, b, part_a, part_b = heapq.heappop(heap)
        if negative >= 0:
            break
        if parts.get(a) != part_a or parts.get(b) != part_b or right.get(a) != b:
            continue  # one of them was merged since
        parts[a] = (part_a[0], part_b[1], part_a[2] + part_b[2])
        del parts[b]
        after = right.pop(b, None)
        if after is None:
            right.pop(a)
        else:
            right[a], left[after] = after, a
            heapq.heappush(heap, (-_gain(costs, parts[a], parts[after]), a, after, parts[a], parts[after]))
        before = left.get(a)
        if before is not None:
            heapq.heappush(heap, (-_gain(costs, parts[before], parts[a]), before, a, parts[before], parts[a]))
    return [parts[k] for k in sorted(parts)]


def _repairable(costs: StageCosts) -> StageCosts:
    """The same with a high cost in place of ``inf``: stages that violate a constraint may be merged until it holds."""
    finite = np.isfinite(costs.cost)
    if finite.all() or not finite.any():
        return costs
    below = np.arange(costs.cost.shape[0])
    stages = (below[:, None] < below[None, :])[:, :, None] & (np.arange(costs.instances + 1) > 0)
    high = 1e3 * (1 + float(costs.cost[finite].max()))
    return replace(costs, cost=np.where(stages & ~finite, high, costs.cost))


def _gain(costs: StageCosts, a: Part, b: Part) -> float:
    """Return the cost that merging two neighbours saves."""
    merged = float(costs.cost[a[0], b[1], a[2] + b[2]])
    apart = float(costs.cost[a] + costs.cost[b] + costs.cut[b[0]])
    return apart - merged if math.isfinite(merged) else -math.inf
