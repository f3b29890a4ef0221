"""Latency and throughput of planned cascades against one model alone and plans by rate only (Cascadia, figs. 5 to 7).

8B and 70B on 16 H100s, and 8B, 70B and 671B on 32 H200s; traces from easy to hard. Plans are made on one half of the
requests and judged on the other. Aim: a 1.5 times tighter SLO, and 1.5 times the throughput, on easy traces.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from millrace.cascade.baselines import rate_only, stand_alone
from millrace.cascade.capacity import TierDeployment
from millrace.cascade.chain import ChainLoad, chain_latencies, chain_p95_s
from millrace.cascade.planner import CascadeDesign, CascadePlanner, CascadeProblem, plan_as_published
from millrace.cascade.replicas import ReplicaModel, ReplicaShape
from millrace.cascade.routing import REJECT_ALL, Routed, route
from millrace.cascade.sample import JudgedSample

from bench.cascade_models import h100_pair, h200_three, has_data
from bench.cascade_traces import NOTE, PAIR, THREE, TRACES, halves, trace

#: Rate at which systems are compared, as a share of the most that the largest model alone serves.
LOAD = 0.7
#: Quality asked for, as a share of the largest model's on the trace.
QUALITIES = (0.97, 0.94)
JUDGE_S = 0.2
THRESHOLDS = 6
REQUESTS = 600
HALVINGS = 6
RATE_FACTOR_MAX = 8.0


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
    print(f"load, over theirs; rates up to {RATE_FACTOR_MAX:g} times the load were tried. Mean (least to most).")
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
        "published": lambda: plan_as_published(planner),
    }
    designs = {each: make() for each, make in makers.items()}
    if designs["stand-alone"] is None:
        return None
    limit_s = _latency(designs["stand-alone"], held_out, rate, seed)
    systems = {
        each: None if design is None else _judged(design, held_out, rate, seed, limit_s)
        for each, design in designs.items()
    }
    return Compared(wanted, rate, systems)


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


def _judged(design: CascadeDesign, sample: JudgedSample, rate: float, seed: int, limit_s: float) -> System:
    low, high = 0.0, RATE_FACTOR_MAX
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        within = _latency(design, sample, middle * rate, seed) <= limit_s
        low, high = (middle, high) if within else (low, middle)
    text = " | ".join(each.text() for each in design.deployments)
    return System(_latency(design, sample, rate, seed), low * rate, _routed(design, sample).quality, text)


def _latency(design: CascadeDesign, sample: JudgedSample, rate: float, seed: int) -> float:
    load = ChainLoad(rate=rate, judge_s=(JUDGE_S,) * (sample.tiers - 1), requests=REQUESTS, seed=seed + 100)
    deployments: tuple[TierDeployment, ...] = design.deployments
    routed = _routed(design, sample)
    if any(share > 0 and not each.replicas for share, each in zip(routed.shares, deployments, strict=True)):
        return math.inf  # a share that no planned request had
    return chain_p95_s(chain_latencies(sample, routed, deployments, load))


def _routed(design: CascadeDesign, sample: JudgedSample) -> Routed:
    """The design's thresholds on other requests; all enter at the first tier that any entered at."""
    first = next(tier for tier, share in enumerate(design.routed.shares) if share > 0)
    return route(sample, design.routed.thresholds, np.full(sample.count, first, dtype=np.int64))


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
        throughput = _range([plan.rate / max(other.rate, 1e-9) for plan, other in both])
        quality = float(np.mean([other.quality for _, other in both]))
        lost = f"; {unserved} of {len(runs)} left out: a tier without replicas was reached" if unserved else ""
        print(f"{head}  {system:<14}{p95:>7.1f}{slo:>22}{throughput:>24}{quality:>11.1f}  {both[0][1].text}{lost}")


def _range(values: Sequence[float]) -> str:
    return f"{np.mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"
