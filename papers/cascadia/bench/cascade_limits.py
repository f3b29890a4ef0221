"""Best cascade that exists on a small cluster, by brute force, beside the planned one and one model alone.

Tells whether the planner or the trace limits what a cascade gains: every way to use the GPUs is simulated under every
routing that keeps the quality, but for routings that send as many requests or more to every tier as another one does.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from millrace.cascade.chain import ChainLoad, chain_latencies, chain_p95_s
from millrace.cascade.routing import Routed

from papers.cascadia.baselines import stand_alone
from papers.cascadia.bench.cascade_models import h100_pair, h200_three, has_data
from papers.cascadia.bench.cascade_slo import QUALITIES, THRESHOLDS, Setting, planner_of, rate_of
from papers.cascadia.bench.cascade_traces import NOTE, PAIR, THREE, TRACES, halves, trace
from papers.cascadia.capacity import HALVINGS, TierCapacity, TierDeployment, service_of
from papers.cascadia.planner import LATENCY_S_MAX, CascadePlanner, subset_routings
from papers.cascadia.replicas import ReplicaShape

#: Requests with which every design is simulated, and designs that are simulated with all.
SCREENED_REQUESTS, KEPT = 300, 60


class Found(NamedTuple):
    """The best design by brute force."""

    p95_s: float
    text: str
    simulated: int


def main() -> int:
    """Print a row per cluster, trace, quality and split."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--settings", nargs="+", choices=["pair", "three"], default=["pair", "three"])
    parser.add_argument("--traces", nargs="+", choices=TRACES, default=TRACES)
    options = parser.parse_args()
    if not has_data():
        print("cascade_limits: the published tables and scores are not here (MILLRACE_DATA)")
        return 0
    found = {
        "pair": lambda: Setting("8B and 70B on 8 H100", 8, h100_pair(), PAIR),
        "three": lambda: Setting("8B, 70B and 671B on 16 H200", 16, h200_three(), THREE),
    }
    for name in options.settings:
        setting = found[name]()
        print(f"\n{setting.name}; {NOTE.format(', '.join(setting.models))}")
        print("p95 s of the half that plans are made on; alone: one model, the smallest that keeps the quality")
        print(f"{'trace':<7}{'quality':>8}{'load/s':>8}{'alone':>7}{'plan':>7}{'best':>7}  plan / best, alone / best")
        for trace_name, share, seed in itertools.product(options.traces, QUALITIES, range(options.seeds)):
            _row(setting, trace_name, share, seed)
    return 0


def _row(setting: Setting, name: str, share: float, seed: int) -> None:
    began = time.process_time()
    sample, _ = halves(trace(name, seed, setting.models), seed)
    wanted = share * float(sample.quality[:, -1].mean())
    rate = rate_of(setting, sample, seed)
    planner = planner_of(setting, sample, rate, wanted, seed)
    plan, alone, best = planner.plan(), stand_alone(planner), brute_force(planner)
    assert plan is not None, "the largest model keeps the load"
    alone_s = alone.p95_s if alone is not None else math.inf
    told = f"{plan.p95_s / best.p95_s:.2f}, {alone_s / best.p95_s:.2f}"
    planned = " | ".join(each.text() for each in plan.deployments)
    spent = f"{best.simulated} simulated, {time.process_time() - began:.0f} s"
    p95 = f"{alone_s:>7.1f}{plan.p95_s:>7.1f}{best.p95_s:>7.1f}"
    print(f"{name:<7}{wanted:>8.1f}{rate:>8.2f}{p95}  {told}  plan {planned}; best {best.text}; {spent}", flush=True)


def brute_force(planner: CascadePlanner) -> Found:
    """The least simulated p95 over all deployments and routings that keep the quality.

    All are simulated with a few requests, and the best of them with as many as the plan was.
    """
    screened: list[tuple[float, int, Routed, tuple[TierDeployment, ...]]] = []
    load = planner.problem.load(planner.model.seed)
    few = replace(load, requests=min(load.requests, SCREENED_REQUESTS))
    for routed in _worth_serving(planner):
        tiers = [planner.tier(routed, index) for index in range(planner.problem.sample.tiers)]
        for deployments in _deployments(tiers, planner.problem.gpus):
            screened.append((_p95_s(planner, routed, deployments, few), len(screened), routed, deployments))
    kept = sorted(screened)[:KEPT]
    p95_s, index = min((_p95_s(planner, routed, each, load), index) for index, (_, _, routed, each) in enumerate(kept))
    return Found(p95_s, " | ".join(each.text() for each in kept[index][3]), len(screened))


def _p95_s(planner: CascadePlanner, routed: Routed, deployments: tuple[TierDeployment, ...], load: ChainLoad) -> float:
    tiers = [service_of(each) for each in deployments]
    return chain_p95_s(chain_latencies(planner.problem.sample, routed, tiers, load))


def _worth_serving(planner: CascadePlanner) -> list[Routed]:
    """Routings that keep the quality, but for those that send no tier less than another one does."""
    problem = planner.problem
    assert problem.quality_min is not None, "asked for by planner_of"
    keeping = [each for each in subset_routings(problem.sample, THRESHOLDS) if each.quality >= problem.quality_min]
    kept: list[Routed] = []
    for routed in sorted(keeping, key=lambda each: sum(each.shares)):
        if not any(all(a <= b for a, b in zip(other.shares, routed.shares, strict=True)) for other in kept):
            kept.append(routed)
    return kept


def _deployments(tiers: Sequence[TierCapacity], gpus: int) -> Iterator[tuple[TierDeployment, ...]]:
    """Every way to use all GPUs that serves every tier's rate."""
    ways = [_ways(tier, gpus) for tier in tiers]
    for split in itertools.product(*(way.items() for way in ways)):
        if sum(used for used, _ in split) == gpus:
            yield from itertools.product(*(found for _, found in split))


def _ways(tier: TierCapacity, gpus: int) -> dict[int, list[TierDeployment]]:
    """By number of GPUs, the deployments of a tier that serve its rate; none for a tier that nobody reaches."""
    if tier.rate <= 0:
        return {0: [TierDeployment((), ())]}
    found: dict[int, list[TierDeployment]] = {}
    for counts in _counts([shape for shape, _ in tier.curves], gpus):
        deployment = _weighted(tier, counts)
        if deployment is not None:
            found.setdefault(deployment.gpus, []).append(deployment)
    return found


def _counts(shapes: Sequence[ReplicaShape], gpus: int) -> Iterator[tuple[int, ...]]:
    if not shapes:
        yield ()
        return
    for count in range(gpus // shapes[0].gpus + 1):
        for others in _counts(shapes[1:], gpus - count * shapes[0].gpus):
            yield (count, *others)


def _weighted(tier: TierCapacity, counts: Sequence[int]) -> TierDeployment | None:
    """So many replicas, each with its rate at the least latency that all keep together; None where they are too few."""

    def rates(latency_s: float) -> list[float]:
        return [curve.highest_rate(latency_s) for _, curve in tier.curves]

    def enough(latency_s: float) -> bool:
        return sum(count * rate for count, rate in zip(counts, rates(latency_s), strict=True)) >= tier.rate

    low, high = 0.0, LATENCY_S_MAX
    if not enough(high):
        return None
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    used = [
        (shape, count, rate)
        for (shape, _), count, rate in zip(tier.curves, counts, rates(high), strict=True)
        if count and rate > 0
    ]
    return TierDeployment(tuple((shape, count) for shape, count, _ in used), tuple(rate for _, _, rate in used))


if __name__ == "__main__":
    raise SystemExit(main())
