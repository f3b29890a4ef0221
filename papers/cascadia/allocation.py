"""GPUs for the tiers of a cascade: the smallest latency that all tiers can keep at once.

Both functions minimise ``max_i latency_i(f_i)`` with ``Σ f_i <= N``. ``bisect_allocation`` is exact and takes
microseconds; ``milp_allocation`` is the paper's formulation, kept as the reference.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import msgspec
import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from papers.cascadia.capacity import TierCapacity

#: Longest that the MILP may take, seconds.
MILP_SECONDS_MAX = 30.0

#: By number of GPUs from 0 on, the latency of one tier, seconds; infinity where it cannot be served.
LatencyTable = Sequence[float]


class Allocation(msgspec.Struct, frozen=True):
    """GPUs of each tier, and the latency that all of them keep, seconds."""

    gpus: tuple[int, ...]
    latency_s: float


def latency_table(tier: TierCapacity, gpus: int) -> list[float]:
    """By number of GPUs from 0 on, the least latency at which the tier's rate is served, seconds."""
    if tier.rate <= 0:
        return [0.0] * (gpus + 1)
    return [tier.least_latency_s(count) for count in range(gpus + 1)]


def bisect_allocation(tables: Sequence[LatencyTable], gpus: int) -> Allocation | None:
    """The least latency that fits, by bisection over the values of the tables; None where nothing does.

    A tier never needs more GPUs for a longer latency, so the total need falls as the latency rises.
    """
    best = [_running_minimum(table, gpus) for table in tables]
    values = sorted({value for table in best for value in table if math.isfinite(value)})
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        need = _needs(best, values[middle])
        if need is not None and sum(need) <= gpus:
            high = middle
        else:
            low = middle + 1
    if low == len(values):
        return None
    need = _needs(best, values[low])
    assert need is not None, "bisection ended on a latency that a tier cannot keep"
    return Allocation(tuple(need), values[low])


def _running_minimum(table: LatencyTable, gpus: int) -> list[float]:
    """The table as if spare GPUs could stay idle."""
    values, best = [], math.inf
    for value in table[: gpus + 1]:
        best = min(best, value)
        values.append(best)
    return values


def _needs(tables: Sequence[Sequence[float]], latency_s: float) -> list[int] | None:
    needs: list[int] = []
    for table in tables:
        # Non-increasing: the first number of GPUs whose latency is at most the one asked for.
        need = bisect_left(table, -latency_s, key=lambda value: -value)
        if need == len(table):
            return None
        needs.append(need)
    return needs


def milp_allocation(tables: Sequence[LatencyTable], gpus: int) -> Allocation | None:
    """The same by mixed-integer programming; None where nothing fits.

    Source: Cascadia, section 3.2. Differs in ``Σ f <= N`` instead of ``= N`` and in tiers without GPUs, without which
    the paper's own table 2 (f3 = 0) would be infeasible.

    Raises:
        RuntimeError: the solver ran out of time.
    """
    choices = [
        (tier, count)
        for tier, table in enumerate(tables)
        for count, value in enumerate(table[: gpus + 1])
        if math.isfinite(value)
    ]
    if len({tier for tier, _ in choices}) < len(tables):
        return None
    tiers, size = len(tables), len(choices)
    rows = np.zeros((2 * tiers + 1, size + 1))
    for column, (tier, count) in enumerate(choices):
        rows[tier, column] = 1
        rows[tiers, column] = count
        rows[tiers + 1 + tier, column] = -tables[tier][count]
    rows[tiers + 1 :, size] = 1
    low = [1.0] * tiers + [0.0] + [0.0] * tiers
    high = [1.0] * tiers + [float(gpus)] + [math.inf] * tiers
    cost = np.zeros(size + 1)
    cost[size] = 1
    solved = milp(
        cost,
        integrality=[1] * size + [0],
        bounds=Bounds([0] * (size + 1), [1] * size + [math.inf]),
        constraints=LinearConstraint(csr_array(rows), low, high),
        options={"time_limit": MILP_SECONDS_MAX, "mip_rel_gap": 0},
    )
    if solved.status == 1:
        raise RuntimeError(f"the allocation was not solved within {MILP_SECONDS_MAX:g} s")
    if solved.x is None:
        return None
    chosen = {tier: count for (tier, count), value in zip(choices, solved.x, strict=False) if value > 0.5}
    return Allocation(tuple(chosen[tier] for tier in range(tiers)), float(solved.fun))
