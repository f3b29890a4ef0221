"""The whole way of requests through a cascade: each pays every tier it reaches, and the judge between them.

The paper plans by the largest tier's p95. An escalated request pays tier 1 + judge + tier 2, so its end-to-end p95 is
another number; this module simulates it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from millrace.cascade.capacity import TierDeployment
from millrace.cascade.replicas import NS, PERCENTILE, serve
from millrace.cascade.routing import Routed
from millrace.cascade.sample import Floats, JudgedSample
from millrace.enginemodel.forecast.question import ReplicaRequest


@dataclass(frozen=True, kw_only=True)
class ChainLoad:
    """Load of a cascade.

    Attributes:
        rate: Arrivals, requests/s (Poisson).
        judge_s: By tier but the last, seconds between an answer and its score.
        requests: How many are drawn from the sample, with replacement; 0 for each of the sample once.
    """

    rate: float
    judge_s: Sequence[float]
    requests: int = 0
    seed: int = 0


def chain_latencies(
    sample: JudgedSample, routed: Routed, deployments: Sequence[TierDeployment], load: ChainLoad, *, native: bool = True
) -> Floats:
    """End-to-end latency of each request, seconds.

    Args:
        native: Whether the compiled engine model may be used; the result is the same.

    Returns:
        (requests,), in order of arrival.

    Raises:
        ValueError: a tier is reached by somebody and has no replica.
    """
    rng = Random(f"{load.seed}/chain")
    count = load.requests or sample.count
    drawn = [rng.randrange(sample.count) for _ in range(count)] if load.requests else rng.sample(range(count), count)
    at, starts = 0.0, []
    for _ in range(count):
        at += rng.expovariate(load.rate)
        starts.append(int(at * NS))
    ready = list(starts)
    for tier in range(sample.tiers):
        present = [index for index in range(count) if routed.reached[drawn[index], tier]]
        if not present:
            continue
        if not deployments[tier].replicas:
            raise ValueError(f"tier {tier} is reached by {len(present)} requests and has no replica")
        present.sort(key=lambda index: ready[index])
        arriving = [
            ReplicaRequest(
                ready[index],
                int(sample.prompt_tokens[drawn[index], tier]),
                int(sample.output_tokens[drawn[index], tier]),
            )
            for index in present
        ]
        judged_ns = int(load.judge_s[tier] * NS) if tier < sample.tiers - 1 else 0
        ends = serve_tier(arriving, deployments[tier], native=native)
        for index, end in zip(present, ends, strict=True):
            ready[index] = end + judged_ns
    return np.array([(ready[index] - starts[index]) / NS for index in range(count)])


def chain_p95_s(latencies: Floats) -> float:
    """95th percentile, seconds."""
    return float(np.percentile(latencies, PERCENTILE))


def serve_tier(requests: Sequence[ReplicaRequest], deployment: TierDeployment, *, native: bool) -> list[int]:
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
        served = serve([requests[position] for position in part], shape, native=native) if part else []
        for position, end in zip(part, served, strict=True):
            ends[position] = end
    return ends
