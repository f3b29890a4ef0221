"""A cascade whose thresholds change over time, on fixed replicas: requests at given times, judged as scores come."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from millrace.cascade.chain import NS
from millrace.cascade.routing import Thresholds
from millrace.cascade.sample import Floats, Integers, JudgedSample
from millrace.enginemodel.forecast.question import ReplicaRequest

from papers.cascadia.capacity import TierDeployment, serve_tier


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Replicas and thresholds of a cascade over time.

    Attributes:
        tiers: Their replicas; the last tier that has any answers whatever its score.
        thresholds: (time, thresholds from then on), rising; an answer is judged by those in force when its score is
            known.
        judge_s: By tier but the last.
    """

    tiers: Sequence[TierDeployment]
    thresholds: Sequence[tuple[int, Thresholds]]
    judge_s: Sequence[float]


@dataclass(frozen=True, eq=False)
class Outcomes:
    """Outcomes of N requests: latency, tier whose answer was delivered, and its quality, (N,) each."""

    latency_s: Floats
    answered_by: Integers
    quality: Floats


def run_timeline(requests: JudgedSample, arrivals_ns: Sequence[int], timeline: Timeline) -> Outcomes:
    """Serve request i, which arrives at ``arrivals_ns[i]`` (rising), with the answers of row i.

    Raises:
        ValueError: no tier has a replica.
    """
    used = [tier for tier, each in enumerate(timeline.tiers) if each.replicas]
    if not used:
        raise ValueError("no tier has a replica")
    ready = list(arrivals_ns)
    answered = np.zeros(requests.count, dtype=np.int64)
    open_ = list(range(requests.count))
    for tier in used:
        open_.sort(key=lambda index: (ready[index], index))
        arriving = [
            ReplicaRequest(ready[i], int(requests.prompt_tokens[i, tier]), int(requests.output_tokens[i, tier]))
            for i in open_
        ]
        passed = []
        for index, end in zip(open_, serve_tier(arriving, timeline.tiers[tier]), strict=True):
            ready[index], answered[index] = end, tier
            if tier == used[-1]:
                continue
            ready[index] += int(timeline.judge_s[tier] * NS)
            if requests.scores[index, tier] < _thresholds(timeline, ready[index])[tier]:
                passed.append(index)
        open_ = passed
    latency = (np.array(ready, dtype=np.float64) - np.array(arrivals_ns, dtype=np.float64)) / NS
    return Outcomes(latency, answered, requests.quality[np.arange(requests.count), answered])


def _thresholds(timeline: Timeline, at_ns: int) -> Thresholds:
    position = bisect_right(timeline.thresholds, at_ns, key=lambda entry: entry[0])
    return timeline.thresholds[max(0, position - 1)][1]
