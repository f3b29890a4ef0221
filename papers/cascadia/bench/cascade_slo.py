"""Latency and throughput of planned cascades against one model alone and plans by rate only (Cascadia, figs. 5 to 7).

8B and 70B on 16 H100s, and 8B, 70B and 671B on 32 H200s; traces from easy to hard. Plans are made on one half of the
requests and judged on the other. Aim: a 1.5 times tighter SLO, and 1.5 times the throughput, on easy traces.

`rate only` has its replicas from the rate and the best thresholds for the present traffic, `rate alone` its thresholds
from the rate, too. The prompt router knows how the other models of WildBench did on a prompt, which is more than a
router can know.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from itertools import combinations_with_replacement
from typing import NamedTuple

import numpy as np
from millrace.cascade.chain import ChainLoad, chain_latencies, chain_p95_s
from millrace.cascade.routing import REJECT_ALL, Routed, route
from millrace.cascade.sample import Floats, Integers, JudgedSample

from papers.cascadia.baselines import (
    ACCEPT_ALL,
    rate_only,
    stand_alone,
    uniform_allocation,
    uniform_parallelism,
)
from papers.cascadia.bench.cascade_models import h100_pair, h200_three, has_data
from papers.cascadia.bench.cascade_traces import NOTE, PAIR, THREE, TRACES, ease, halves, halves_of, trace, trace_rows
from papers.cascadia.capacity import TierDeployment, service_of
from papers.cascadia.planner import CascadeDesign, CascadePlanner, CascadeProblem
from papers.cascadia.published_loop import plan_as_published
from papers.cascadia.replicas import ReplicaModel, ReplicaShape

#: Rate at which systems are compared, as a share of the most that the largest model alone serves.
LOAD = 0.7
#: Quality asked for, as a share of the largest model's on the trace.
QUALITIES = (0.97, 0.94)
JUDGE_S = 0.2
THRESHOLDS = 12
REQUESTS = 600
HALVINGS = 6
RATE_FACTOR_MAX = 8.0
#: Quantiles of ease at which the prompt router may cut.
ROUTER_CUTS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8)


class Setting(NamedTuple):
    """A cluster and the models that answer."""

    name: str
    gpus: int
    shapes: Sequence[Sequence[ReplicaShape]]
    models: tuple[str, ...]


class System(NamedTuple):
    """Results of one way of serving on held-out requests."""

    p95_s: float
    rate: float
    quality: float
    text: str


def main() -> int:
    """Print a row per trace, quality and system."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--settings", nargs="+", choices=["pair", "three"], default=["pair", "three"])
    parser.add_argument("--traces", nargs="+", choices=TRACES, default=TRACES)
    options = parser.parse_args()
    if not has_data():
        print("cascade_slo: the published tables and scores are not here (MILLRACE_DATA)")
        return 0
    found = {
        "pair": lambda: Setting("8B and 70B on 16 H100", 16, h100_pair(), PAIR),
        "three": lambda: Setting("8B, 70B and 671B on 32 H200", 32, h200_three(), THREE),
    }
    for name in options.settings:
        _setting(found[name](), options.seeds, options.traces)
    return 0


def _setting(setting: Setting, seeds: int, traces: Sequence[str]) -> None:
    print(f"\n{setting.name}; {NOTE.format(', '.join(setting.models))}")
    print(
        "SLO: p95 over the plan's. Throughput: the plan's highest rate within the p95 that one model alone has at this"
    )
    print(f"load, over theirs where they have one; up to {RATE_FACTOR_MAX:g} times the load. Mean (least to most).")
    columns = f"{'p95 s':>7}{'SLO ×':>22}{'throughput ×':>24}{'held-out Q':>11}"
    print(f"{'trace':<7}{'quality':>8}{'load/s':>8}  {'system':<14}{columns}")
    for name in traces:
        for share in QUALITIES:
            began = time.process_time()
            runs = [_run(setting, name, share, seed) for seed in range(seeds)]
            _print(name, [each for each in runs if each is not None])
            print(f"{'':7}{len(runs)} splits, {time.process_time() - began:.0f} s of CPU", flush=True)


class Compared(NamedTuple):
    """One split."""

    wanted: float
    rate: float
    systems: dict[str, System | None]


def _run(setting: Setting, name: str, share: float, seed: int) -> Compared | None:
    planned, held_out = halves(trace(name, seed, setting.models), seed)
    usual, _ = halves(trace("mixed", seed, setting.models), seed)
    wanted = share * float(planned.quality[:, -1].mean())
    rate = rate_of(setting, planned, seed)
    planner = planner_of(setting, planned, rate, wanted, seed)
    same = planner_of(setting, usual, rate, share * float(usual.quality[:, -1].mean()), seed)
    makers: dict[str, Callable[[], CascadeDesign | None]] = {
        "plan": planner.plan,
        "stand-alone": lambda: stand_alone(planner),
        "rate only": lambda: rate_only(planner, same),
        "rate alone": lambda: rate_only(planner, same, own_thresholds=True),
        "uniform ways": lambda: uniform_parallelism(planner),
        "uniform share": lambda: uniform_allocation(planner),
        "published": lambda: plan_as_published(planner),
    }
    routings = {each: _by_thresholds(make(), held_out) for each, make in makers.items()}
    routings["prompt router"] = _prompt_router(setting, name, planner, held_out, seed)
    alone = routings["stand-alone"]
    if alone is None:
        return None
    limit_s = _latency(alone, held_out, rate, seed)
    systems = {
        each: None if served is None else _judged(served, held_out, rate, seed, limit_s)
        for each, served in routings.items()
    }
    return Compared(wanted, rate, systems)


class ServedDesign(NamedTuple):
    """A design, and what it does with the held-out requests."""

    design: CascadeDesign
    routed: Routed


def _by_thresholds(design: CascadeDesign | None, held_out: JudgedSample) -> ServedDesign | None:
    """The design's thresholds on other requests; tiers without replicas are passed over."""
    if design is None:
        return None
    tiers = [tier for tier, each in enumerate(design.deployments) if each.replicas]
    return ServedDesign(design, route(held_out, design.routed.thresholds, tiers=tiers))


def _prompt_router(
    setting: Setting, name: str, planner: CascadePlanner, held_out: JudgedSample, seed: int
) -> ServedDesign | None:
    """The best of some cuts of how easy a prompt is by the other models; nothing is judged."""
    known = ease(setting.models)[trace_rows(name)]
    planned, others = (known[rows] for rows in halves_of(len(known), seed))
    accept, found = (ACCEPT_ALL,) * (held_out.tiers - 1), []
    for cuts in combinations_with_replacement([*np.quantile(planned, ROUTER_CUTS).tolist(), math.inf], len(accept)):
        design = planner.deploy(route(planner.problem.sample, accept, _entries(planned, cuts)))
        if design is not None:
            found.append((planner.simulated(design), cuts))
    best = planner.problem.best([design for design, _ in found])
    if best is None:
        return None
    cuts = next(cuts for design, cuts in found if design.routed is best.routed)
    return ServedDesign(best, route(held_out, accept, _entries(others, cuts)))


def _entries(known: Floats, cuts: Sequence[float]) -> Integers:
    """Tier of each request: the largest below the first cut, and so on."""
    entry = np.zeros(len(known), dtype=np.int64)
    for tier, cut in enumerate(reversed(cuts), 1):
        entry[known < cut] = tier
    return entry


def planner_of(setting: Setting, sample: JudgedSample, rate: float, wanted: float, seed: int) -> CascadePlanner:
    """A planner for a mean quality on the sample."""
    problem = CascadeProblem(
        sample=sample,
        rate=rate,
        gpus=setting.gpus,
        shapes=setting.shapes,
        judge_s=(JUDGE_S,) * (sample.tiers - 1),
        quality_min=wanted,
        use_confidence=False,
        thresholds_most=THRESHOLDS,
    )
    return CascadePlanner(problem, ReplicaModel(seed=seed))


def rate_of(setting: Setting, sample: JudgedSample, seed: int) -> float:
    """The rate at which systems are compared: a share of the most that the largest model serves on all GPUs."""
    planner = planner_of(setting, sample, 1.0, 100.0, seed)
    last = sample.tiers - 1
    everything = route(sample, (REJECT_ALL,) * last, np.full(sample.count, last))
    return LOAD * planner.tier(everything, last).capacities(math.inf, setting.gpus)[setting.gpus]


def _judged(served: ServedDesign, sample: JudgedSample, rate: float, seed: int, limit_s: float) -> System:
    low, high = 0.0, RATE_FACTOR_MAX
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        within = _latency(served, sample, middle * rate, seed) <= limit_s
        low, high = (middle, high) if within else (low, middle)
    text = " | ".join(each.text() for each in served.design.deployments)
    return System(_latency(served, sample, rate, seed), low * rate, served.routed.quality, text)


def _latency(served: ServedDesign, sample: JudgedSample, rate: float, seed: int) -> float:
    load = ChainLoad(rate=rate, judge_s=(JUDGE_S,) * (sample.tiers - 1), requests=REQUESTS, seed=seed + 100)
    deployments: tuple[TierDeployment, ...] = served.design.deployments
    if any(share > 0 and not each.replicas for share, each in zip(served.routed.shares, deployments, strict=True)):
        return math.inf  # a share that no planned request had
    return chain_p95_s(chain_latencies(sample, served.routed, [service_of(each) for each in deployments], load))


def _print(name: str, runs: Sequence[Compared]) -> None:
    if not runs:
        print(f"{name:<7} the largest model alone does not keep the load")
        return
    wanted = float(np.mean([run.wanted for run in runs]))
    rate = float(np.mean([run.rate for run in runs]))
    for index, system in enumerate(runs[0].systems):
        pairs = [(run.systems["plan"], run.systems[system]) for run in runs]
        both = [(plan, other) for plan, other in pairs if plan is not None and other is not None]
        unserved = sum(math.isinf(each.p95_s) for pair in both for each in pair)
        both = [(plan, other) for plan, other in both if math.isfinite(plan.p95_s) and math.isfinite(other.p95_s)]
        head = f"{name:<7}{wanted:>8.1f}{rate:>8.2f}" if index == 0 else " " * 23
        if not both:
            print(f"{head}  {system:<14} no plan")
            continue
        p95 = float(np.mean([other.p95_s for _, other in both]))
        slo = _range([other.p95_s / plan.p95_s for plan, other in both])
        throughput = _range([plan.rate / other.rate for plan, other in both if other.rate > 0])
        quality = float(np.mean([other.quality for _, other in both]))
        lost = f"; {unserved} of {len(runs)} left out: a tier without replicas was reached" if unserved else ""
        print(f"{head}  {system:<14}{p95:>7.1f}{slo:>22}{throughput:>24}{quality:>11.1f}  {both[0][1].text}{lost}")


def _range(values: Sequence[float]) -> str:
    if not values:
        return "none of theirs"
    return f"{np.mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"
