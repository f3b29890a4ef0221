"""Time of a cascade plan on N GPUs; agreement of bisection, MILP and brute force (three tiers, 8B to 70B).

Aims: median of at most 5 s on two cores at N = 16 to 80 (paper: 20 s at 32, 60 s at 80, on 12 cores); MILP = bisection;
within 2 % of brute force over thresholds and allocations where that is possible.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time

from millrace.cascade.routing import route, routings

from papers.cascadia.allocation import bisect_allocation, latency_table, milp_allocation
from papers.cascadia.bench.cascade_models import MODELS, has_data, replica_shapes
from papers.cascadia.bench.cascade_traces import wildbench
from papers.cascadia.planner import CascadePlanner, CascadeProblem
from papers.cascadia.published_loop import plan_as_published
from papers.cascadia.replicas import ReplicaModel

#: Requests/s for each GPU: about half of what the planned allocations can serve.
RATE_PER_GPU = 0.15
QUALITY_MIN = 68.0
JUDGE_S = (0.2, 0.2)
BRUTE_FORCE_GPUS = 16


def main() -> int:
    """Print a row per number of GPUs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int, nargs="+", default=[16, 32, 48, 64, 80])
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    if not has_data():
        print("cascade_solver: the published tables and scores are not here (MILLRACE_DATA)")
        return 0
    print(f"{'N':>4}{'median s':>10}{'max s':>8}{'runs':>7}{'MILP s':>8}{'equal':>8}  plan of seed 0")
    for gpus in options.gpus:
        _row(gpus, options.seeds)
    _brute_force(BRUTE_FORCE_GPUS)
    return 0


def _problem(gpus: int, seed: int) -> CascadeProblem:
    return CascadeProblem(
        sample=wildbench(seed),
        rate=RATE_PER_GPU * gpus,
        gpus=gpus,
        shapes=[replica_shapes(model) for model in MODELS],
        judge_s=JUDGE_S,
        quality_min=QUALITY_MIN,
    )


def _row(gpus: int, seeds: int) -> None:
    seconds, runs, text, agree, solved_s = [], 0, "", True, []
    for seed in range(seeds):
        problem = _problem(gpus, seed)
        planner = CascadePlanner(problem, ReplicaModel(seed=seed))
        began = time.perf_counter()
        plan = planner.plan()
        seconds.append(time.perf_counter() - began)
        runs = planner.model.runs
        if plan is None:
            text = text or "no plan"
            continue
        tables = [latency_table(planner.tier(plan.routed, tier), gpus) for tier in range(len(MODELS))]
        began = time.perf_counter()
        solved, bisected = milp_allocation(tables, gpus), bisect_allocation(tables, gpus)
        solved_s.append(time.perf_counter() - began)
        agree = agree and solved is not None and bisected is not None and _near(solved.latency_s, bisected.latency_s)
        if seed == 0:
            replicas = " | ".join(each.text() for each in plan.deployments)
            shares = " ".join(f"{share:.2f}" for share in plan.routed.shares)
            text = f"p95 {plan.p95_s:.1f} s, quality {plan.routed.quality:.1f}, shares {shares}: {replicas}"
    milp_s = statistics.median(solved_s) if solved_s else 0.0
    print(
        f"{gpus:>4}{statistics.median(seconds):>10.2f}{max(seconds):>8.2f}{runs:>7}{milp_s:>8.3f}"
        f"{'yes' if agree else 'NO':>8}  {text}"
    )


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-6 * max(one, other)


def _brute_force(gpus: int) -> None:
    """The plan's tier latency against every routing on a finer grid with every split of the GPUs."""
    problem = _problem(gpus, 0)
    planner = CascadePlanner(problem)
    plans = [design for design in planner.front() if design.routed.quality_low >= QUALITY_MIN]
    best = min((design.tier_latency_s for design in plans), default=float("inf"))
    found = float("inf")
    for routed in routings(problem.sample, most=12):
        if routed.quality_low < QUALITY_MIN:
            continue
        tables = [latency_table(planner.tier(routed, tier), gpus) for tier in range(len(MODELS))]
        splits = (split for split in itertools.product(range(gpus + 1), repeat=len(MODELS)) if sum(split) <= gpus)
        found = min(found, *(max(table[n] for table, n in zip(tables, s, strict=True)) for s in splits))
    published = plan_as_published(planner)
    told = route(problem.sample, published.routed.thresholds) if published is not None else None
    print(f"brute force, N = {gpus}: {found:.3f} s; plan {best:.3f} s ({best / found - 1:+.1%})")
    if published is not None and told is not None:
        print(f"published loop: {published.tier_latency_s:.3f} s at quality {told.quality:.1f}")


if __name__ == "__main__":
    raise SystemExit(main())
