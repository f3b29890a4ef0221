"""A cascade over time: replicas that come and go, thresholds that change, requests at given times.

``chain.py`` simulates one plan in a steady state; this module simulates changes of plan with what they cost.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from millrace.cascade.capacity import TierDeployment
from millrace.cascade.replicas import NS, ReplicaShape, serve
from millrace.cascade.routing import Thresholds
from millrace.cascade.sample import Floats, Integers, JudgedSample
from millrace.enginemodel.forecast.question import ReplicaRequest

FOREVER_NS = 1 << 62


@dataclass(frozen=True, kw_only=True)
class PlacedReplica:
    """A replica that takes requests for some time; it finishes those that it has when the time ends.

    Attributes:
        weight: Its share of its tier's requests, relative to the other replicas.
        from_ns, until_ns: When it takes requests.
    """

    shape: ReplicaShape
    weight: float
    from_ns: int = 0
    until_ns: int = FOREVER_NS


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Replicas and thresholds of a cascade over time.

    Attributes:
        tiers: By tier, its replicas.
        thresholds: (time, thresholds from then on), rising; an answer is judged by those in force when its score is
            known.
        judge_s: By tier but the last.
    """

    tiers: Sequence[Sequence[PlacedReplica]]
    thresholds: Sequence[tuple[int, Thresholds]]
    judge_s: Sequence[float]


@dataclass(frozen=True, eq=False)
class Outcomes:
    """Outcomes of N requests.

    Attributes:
        latency_s: (N,).
        answered_by: (N,): the tier whose answer was delivered.
        quality: (N,).
        busy_until_ns: By tier, the end of each replica's last request; 0 of one that had none.
    """

    latency_s: Floats
    answered_by: Integers
    quality: Floats
    busy_until_ns: tuple[tuple[int, ...], ...]


def placed(deployment: TierDeployment, *, from_ns: int = 0, until_ns: int = FOREVER_NS) -> list[PlacedReplica]:
    """The replicas of a deployment, weighted by their planned rates."""
    return [
        PlacedReplica(shape=shape, weight=rate, from_ns=from_ns, until_ns=until_ns)
        for (shape, count), rate in zip(deployment.replicas, deployment.rates, strict=True)
        for _ in range(count)
    ]


def run_timeline(
    requests: JudgedSample, arrivals_ns: Sequence[int], timeline: Timeline, *, native: bool = True
) -> Outcomes:
    """Serve request i, which arrives at ``arrivals_ns[i]`` (rising), with the answers of row i.

    A tier without a replica at the time is skipped. An answer is delivered whatever its score where no later tier has
    one then. Where no tier has one when the request comes, it waits for the next one of the last tier that has any.

    Raises:
        ValueError: a request can never be answered.
    """
    count = requests.count
    last = max((tier for tier, each in enumerate(timeline.tiers) if each), default=requests.tiers - 1)
    last = max((tier for tier, each in enumerate(timeline.tiers) if _stays(each)), default=last)
    ready, answered = list(arrivals_ns), np.full(count, last, dtype=np.int64)
    open_ = list(range(count))
    busy: list[tuple[int, ...]] = []
    for tier in range(requests.tiers):
        taken = [index for index in open_ if tier == last or _has_replica(timeline.tiers[tier], ready[index])]
        skipped = set(open_) - set(taken)
        taken.sort(key=lambda index: (ready[index], index))
        lengths = [(int(requests.prompt_tokens[i, tier]), int(requests.output_tokens[i, tier])) for i in taken]
        arriving = [ReplicaRequest(ready[index], *each) for index, each in zip(taken, lengths, strict=True)]
        ends, until = serve_tier(arriving, timeline.tiers[tier], native=native)
        busy.append(until)
        passed = []
        for index, end in zip(taken, ends, strict=True):
            ready[index] = end
            answered[index] = tier
            if tier < requests.tiers - 1 and _may_follow(timeline, tier, last, end):
                ready[index] += int(timeline.judge_s[tier] * NS)
                if requests.scores[index, tier] < _thresholds(timeline, ready[index])[tier]:
                    passed.append(index)
        open_ = sorted({*skipped, *passed})
    latency = (np.array(ready, dtype=np.float64) - np.array(arrivals_ns, dtype=np.float64)) / NS
    return Outcomes(latency, answered, requests.quality[np.arange(count), answered], tuple(busy))


def _thresholds(timeline: Timeline, at_ns: int) -> Thresholds:
    position = bisect_right(timeline.thresholds, at_ns, key=lambda entry: entry[0])
    return timeline.thresholds[max(0, position - 1)][1]


def _may_follow(timeline: Timeline, tier: int, last: int, at_ns: int) -> bool:
    later = range(tier + 1, len(timeline.tiers))
    return any(each == last or _has_replica(timeline.tiers[each], at_ns) for each in later)


def _stays(replicas: Sequence[PlacedReplica]) -> bool:
    return any(replica.until_ns == FOREVER_NS for replica in replicas)


def _has_replica(replicas: Sequence[PlacedReplica], at_ns: int) -> bool:
    return any(replica.from_ns <= at_ns < replica.until_ns for replica in replicas)


def serve_tier(
    requests: Sequence[ReplicaRequest], replicas: Sequence[PlacedReplica], *, native: bool
) -> tuple[list[int], tuple[int, ...]]:
    """End of each request on one tier's replicas, ns, and of each replica's last one (0 where it had none).

    Replicas that take requests take turns in proportion to their weights (smooth weighted round robin).

    Raises:
        ValueError: no replica takes requests when one arrives, or later.
    """
    parts: list[list[tuple[int, ReplicaRequest]]] = [[] for _ in replicas]
    for position, (index, request) in enumerate(_dispatched(requests, replicas)):
        parts[index].append((position, request))
    ends = [0] * len(requests)
    until = []
    for replica, part in zip(replicas, parts, strict=True):
        served = serve([request for _, request in part], replica.shape, native=native) if part else []
        until.append(max(served, default=0))
        for (position, _), end in zip(part, served, strict=True):
            ends[position] = end
    return ends, tuple(until)


def _dispatched(
    requests: Sequence[ReplicaRequest], replicas: Sequence[PlacedReplica]
) -> list[tuple[int, ReplicaRequest]]:
    """Replica of each request; one that joins starts level with the others."""
    coming = sorted(range(len(replicas)), key=lambda index: -replicas[index].from_ns)
    turns: list[tuple[float, int]] = []
    level, found = 0.0, []
    for request in requests:
        at = request.at_ns
        while coming and (replicas[coming[-1]].from_ns <= at or not _any_open(turns, replicas, at)):
            index = coming.pop()
            at = max(at, replicas[index].from_ns)
            heapq.heappush(turns, (level + 1 / replicas[index].weight, index))
        while turns and replicas[turns[0][1]].until_ns <= at:
            heapq.heappop(turns)
        if not turns:
            raise ValueError(f"a request at {request.at_ns} ns has no replica then or later")
        level, index = turns[0]
        heapq.heapreplace(turns, (level + 1 / replicas[index].weight, index))
        at = max(request.at_ns, replicas[index].from_ns)
        found.append((index, ReplicaRequest(at, request.prompt_tokens, request.output_tokens)))
    return found


def _any_open(turns: Sequence[tuple[float, int]], replicas: Sequence[PlacedReplica], at_ns: int) -> bool:
    return any(replicas[index].until_ns > at_ns for _, index in turns)
