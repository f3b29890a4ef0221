"""The whole way of requests through a cascade: each pays every tier it reaches, and the judge between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from millrace.cascade.routing import Routed
from millrace.cascade.sample import Floats, JudgedSample
from millrace.enginemodel.forecast.question import ReplicaRequest
from millrace.enginemodel.forecast.replica import simulate_replica
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_cost import StepCost

NS = 1_000_000_000

#: The percentile that counts as a cascade's latency.
PERCENTILE = 95.0

#: Simulates one tier: from requests in order of arrival to their ends, ns.
TierService = Callable[[Sequence[ReplicaRequest]], list[int]]


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


def equal_instances(count: int, cost: StepCost, parameters: EngineParameters) -> TierService | None:
    """Instances that take turns; None for none."""

    def ends_of(requests: Sequence[ReplicaRequest]) -> list[int]:
        ends = [0] * len(requests)
        for index in range(count):
            part = requests[index::count]
            ends[index::count] = [one.end_ns for one in simulate_replica(part, cost, parameters)] if part else []
        return ends

    return ends_of if count else None


def chain_latencies(
    sample: JudgedSample, routed: Routed, tiers: Sequence[TierService | None], load: ChainLoad
) -> Floats:
    """End-to-end latency of each request, seconds.

    Returns:
        (requests,), in order of arrival.

    Raises:
        ValueError: a tier is reached by somebody and has no instance.
    """
    rng = Random(f"{load.seed}/chain")
    count = load.requests or sample.count
    drawn = [rng.randrange(sample.count) for _ in range(count)] if load.requests else rng.sample(range(count), count)
    at, starts = 0.0, []
    for _ in range(count):
        at += rng.expovariate(load.rate)
        starts.append(int(at * NS))
    ready = list(starts)
    for tier, service in enumerate(tiers):
        present = [index for index in range(count) if routed.reached[drawn[index], tier]]
        if not present:
            continue
        if service is None:
            raise ValueError(f"tier {tier} is reached by {len(present)} requests and has no instance")
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
        for index, end in zip(present, service(arriving), strict=True):
            ready[index] = end + judged_ns
    return np.array([(ready[index] - starts[index]) / NS for index in range(count)])


def chain_p95_s(latencies: Floats) -> float:
    """95th percentile, seconds."""
    return float(np.percentile(latencies, PERCENTILE))
