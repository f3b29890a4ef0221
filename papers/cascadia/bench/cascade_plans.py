"""Plans of three tiers by the quality asked for (Cascadia, tables 2 and 3, fig. 8): 8B, 70B and 671B on 32 H200s.

Aims: for less quality fewer requests at the largest model and fewer GPUs for it, until it has none; p95 of the tiers
within 1.3 of each other, as far as whole replicas allow.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from papers.cascadia.bench.cascade_models import h200_three, has_data
from papers.cascadia.bench.cascade_slo import Setting, planner_of, rate_of
from papers.cascadia.bench.cascade_traces import NOTE, THREE, wildbench
from papers.cascadia.planner import CascadeDesign, CascadePlanner
from papers.cascadia.published_loop import plan_as_published

GPUS = 32
QUALITIES = (1.0, 0.98, 0.95, 0.9, 0.8, 0.65)


def main() -> int:
    """Print a table of seed 0, and over all seeds what is monotone."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    if not has_data():
        print("cascade_plans: the published tables and scores are not here (MILLRACE_DATA)")
        return 0
    setting = Setting("8B, 70B and 671B on 32 H200", GPUS, h200_three(), THREE)
    print(f"{setting.name}; {NOTE.format(', '.join(THREE))}")
    shares, gpus, spreads, gaps = [], [], [], []
    for seed in range(options.seeds):
        planner, plans = _plans(setting, seed)
        if seed == 0:
            _table(planner, plans)
        shares.append(_falls([plan.routed.shares[-1] for _, plan in plans]))
        gpus.append(_falls([float(plan.gpus[-1]) for _, plan in plans]))
        spreads += [spread for _, plan in plans if (spread := _spread(planner, plan)) is not None]
        gaps += [gap for wanted, plan in plans if (gap := _gap(planner, wanted, plan)) is not None]
    print(f"share of the largest model falls with quality: {sum(shares)} of {len(shares)} seeds")
    print(f"its GPUs fall with quality: {sum(gpus)} of {len(gpus)} seeds")
    print(f"slowest over fastest tier, p95: median {np.median(spreads):.2f}, p90 {np.percentile(spreads, 90):.2f}")
    print(
        f"the published Chebyshev-guided loop, p95 over the plan's: mean {np.mean(gaps):.3f}, most {max(gaps):.3f} "
        f"({len(gaps)} plans that keep the quality)"
    )
    return 0


def _plans(setting: Setting, seed: int) -> tuple[CascadePlanner, list[tuple[float, CascadeDesign]]]:
    """The best plan for each quality, from one front."""
    sample = wildbench(seed, THREE)
    largest = float(sample.quality[:, -1].mean())
    planner = planner_of(setting, sample, rate_of(setting, sample, seed), largest, seed)
    front, plans = planner.front(), []
    for share in QUALITIES:
        wanted = share * largest
        best = _asking(planner, wanted).problem.best(front)
        assert best is not None, "a front is never empty where the largest model keeps the load"
        plans.append((wanted, best))
    return planner, plans


def _asking(planner: CascadePlanner, wanted: float) -> CascadePlanner:
    return CascadePlanner(replace(planner.problem, quality_min=wanted), planner.model)


def _table(planner: CascadePlanner, plans: Sequence[tuple[float, CascadeDesign]]) -> None:
    print(f"seed 0, {planner.problem.rate:.2f} requests/s; threshold `all`: every answer is escalated")
    names = "".join(f"{name:>6}" for name in ("h1", "h2", "p1", "p2", "p3"))
    print(f"{'quality':>8}{'reached':>9}{names}{'f1':>4}{'f2':>4}{'f3':>4}{'p95 s':>7}")
    for wanted, plan in plans:
        h1, h2 = ("all" if math.isinf(value) else f"{value:.0f}" for value in plan.routed.thresholds)
        shares = "".join(f"{share:>6.0%}" for share in plan.routed.shares)
        gpus = "".join(f"{count:>4}" for count in plan.gpus)
        replicas = " | ".join(each.text() for each in plan.deployments)
        print(f"{wanted:>8.1f}{plan.routed.quality:>9.1f}{h1:>6}{h2:>6}{shares}{gpus}{plan.p95_s:>7.1f}  {replicas}")


def _falls(values: Sequence[float]) -> bool:
    return all(after <= before for before, after in itertools.pairwise(values))


def _spread(planner: CascadePlanner, plan: CascadeDesign) -> float | None:
    """Slowest over fastest tier, each at the least p95 that its GPUs allow; None with one tier in use."""
    latencies = [
        planner.tier(plan.routed, tier).least_latency_s(plan.gpus[tier])
        for tier, share in enumerate(plan.routed.shares)
        if share > 0
    ]
    return max(latencies) / min(latencies) if len(latencies) > 1 else None


def _gap(planner: CascadePlanner, wanted: float, plan: CascadeDesign) -> float | None:
    """p95 of the published loop's plan over ours, where both keep the quality."""
    published = plan_as_published(_asking(planner, wanted))
    if published is None or published.routed.quality < wanted or not plan.meets:
        return None
    return published.p95_s / plan.p95_s


if __name__ == "__main__":
    raise SystemExit(main())
