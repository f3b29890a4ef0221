"""The highest rate of one tier on a number of GPUs, over every mixture of replica shapes.

A mixture keeps a latency if each of its replicas keeps it at its own share of the rate, so rates add up: an unbounded
knapsack over shapes. This covers all (DP, TP, PP) combinations (170,786 multisets for an 8B model on 32 GPUs)
in ``O(GPUs · shapes)``.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from functools import partial

import msgspec
from millrace.cascade.chain import TierService
from millrace.enginemodel.forecast.question import ReplicaRequest

from papers.cascadia.replicas import RateCurve, ReplicaShape, serve

#: Halvings of a latency interval; 2^-30 of a minute is 56 ns.
HALVINGS = 30


class TierDeployment(msgspec.Struct, frozen=True):
    """Replicas of one tier: (shape, count), and each shape's rate at the latency planned for, requests/s."""

    replicas: tuple[tuple[ReplicaShape, int], ...]
    rates: tuple[float, ...]

    @property
    def gpus(self) -> int:
        return sum(shape.gpus * count for shape, count in self.replicas)

    def text(self) -> str:
        """For example ``2×tp4 + 1×tp8``; ``none`` for a tier without replicas."""
        return " + ".join(f"{count}×{shape.name}" for shape, count in self.replicas) or "none"


#: Deployment of a tier that nobody reaches.
NO_REPLICAS = TierDeployment((), ())


class TierCapacity:
    """Serving capacity of one tier: the rate curves of its shapes, and the rate that it must serve."""

    def __init__(self, curves: Sequence[tuple[ReplicaShape, RateCurve]], rate: float) -> None:
        """``rate``: requests/s that reach the tier; 0 for a tier that nobody reaches."""
        self.rate = rate
        self.curves = list(curves)

    def capacities(self, latency_s: float, gpus: int, *, enough: float = math.inf) -> list[float]:
        """Highest rate that keeps the latency, by number of GPUs from 0 on; spare GPUs may stay idle.

        Args:
            enough: The list ends with the first rate that reaches this.
        """
        pairs = [(shape.gpus, curve.highest_rate(latency_s)) for shape, curve in self.curves]
        rates = [pair for pair in pairs if pair[1] > 0]
        best = [0.0]
        for count in range(1, gpus + 1):
            most = best[-1]
            for size, rate in rates:
                if size <= count and best[count - size] + rate > most:
                    most = best[count - size] + rate
            best.append(most)
            if most >= enough:
                break
        return best

    def need(self, latency_s: float, gpus: int) -> int | None:
        """Fewest GPUs that serve the tier's rate within the latency; None where ``gpus`` are not enough."""
        if self.rate <= 0:
            return 0
        capacities = self.capacities(latency_s, gpus, enough=self.rate)
        return len(capacities) - 1 if capacities[-1] >= self.rate else None

    def deployment(self, latency_s: float, gpus: int) -> TierDeployment:
        """The replicas behind ``capacities(latency_s, gpus)[gpus]``; shapes that serve nothing are left out."""
        capacities = self.capacities(latency_s, gpus)
        counts = [0] * len(self.curves)
        left = gpus
        while left > 0:
            taken = next(
                (
                    index
                    for index, (shape, curve) in enumerate(self.curves)
                    if shape.gpus <= left
                    and curve.highest_rate(latency_s) > 0
                    and math.isclose(
                        capacities[left], capacities[left - shape.gpus] + curve.highest_rate(latency_s), rel_tol=1e-12
                    )
                ),
                None,
            )
            if taken is None:
                left -= 1  # idle
            else:
                counts[taken] += 1
                left -= self.curves[taken][0].gpus
        used = [(shape, curve, count) for (shape, curve), count in zip(self.curves, counts, strict=True) if count]
        return TierDeployment(
            tuple((shape, count) for shape, _, count in used),
            tuple(curve.highest_rate(latency_s) for _, curve, _ in used),
        )

    def least_latency_s(self, gpus: int) -> float:
        """The least latency at which so many GPUs serve the tier's rate, seconds; infinity where none does."""
        longest = max((curve.latencies_s[-1] for _, curve in self.curves), default=0.0)
        if not self.curves or self.capacities(longest, gpus)[gpus] < self.rate:
            return math.inf
        low, high = 0.0, longest
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            if self.capacities(middle, gpus)[gpus] >= self.rate:
                high = middle
            else:
                low = middle
        return high


def allocate(tiers: Sequence[TierCapacity], gpus: int, *, longest_s: float) -> tuple[tuple[int, ...], float] | None:
    """GPUs of each tier and the least latency that all tiers keep at once, at most ``longest_s``; None where none is.

    Bisection over the latency with the tiers' exact needs; every mixture of replicas is covered.
    """
    if _total(tiers, longest_s, gpus) is None:
        return None
    low, high = 0.0, longest_s
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if _total(tiers, middle, gpus) is None:
            low = middle
        else:
            high = middle
    needs = _total(tiers, high, gpus)
    assert needs is not None, "bisection ended on a latency that does not fit"
    return needs, high


def _total(tiers: Sequence[TierCapacity], latency_s: float, gpus: int) -> tuple[int, ...] | None:
    needs: list[int] = []
    for tier in tiers:
        need = tier.need(latency_s, gpus - sum(needs))
        if need is None:
            return None
        needs.append(need)
    return tuple(needs)


def service_of(deployment: TierDeployment) -> TierService | None:
    """Simulation of a tier for ``chain_latencies``; None for one without replicas."""
    return partial(serve_tier, deployment=deployment) if deployment.replicas else None


def serve_tier(requests: Sequence[ReplicaRequest], deployment: TierDeployment) -> list[int]:
    """End of each request on one tier's replicas, ns.

    Replicas take turns in proportion to their planned rates (smooth weighted round robin).
    """
    rows = zip(deployment.replicas, deployment.rates, strict=True)
    replicas = [(shape, rate) for (shape, count), rate in rows for _ in range(count)]
    turns = [(1 / rate, index) for index, (_, rate) in enumerate(replicas)]
    heapq.heapify(turns)
    parts: list[list[int]] = [[] for _ in replicas]
    for position in range(len(requests)):
        level, index = turns[0]
        heapq.heapreplace(turns, (level + 1 / replicas[index][1], index))
        parts[index].append(position)
    ends = [0] * len(requests)
    for (shape, _), part in zip(replicas, parts, strict=True):
        served = serve([requests[position] for position in part], shape) if part else []
        for position, end in zip(part, served, strict=True):
            ends[position] = end
    return ends
