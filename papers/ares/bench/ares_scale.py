"""Variance of load over 8 to 256 decode instances, and what rescheduling gains by how many requests each runs.

    python -m bench ares_scale
    python -m bench ares_scale --parts cluster --rows FILE

Parts: ``instances``: ARES's figure 12, 0.0375 requests/s per instance, 25 Gb/s, rests known exactly: nobody moves, the
paper's rule on present loads, ARES with the paper's one move a second, and with one for each eight instances.
``running``: 32 instances whose lengths are shorter and come more often, so that each runs more of them at the same load
in tokens. Beside the measured deviation of loads stands what random placement gives, sqrt((1 + c²) / n), where n
requests run per instance and c is the coefficient of variation of their lengths. Both parts simulate loads without
messages (`bench/moving/levelling.py`). ``cluster``: eight instances as a whole simulated cluster, with brokers. Aim:
variance at least 50 % lower.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from math import sqrt

import msgspec
from millrace.enginemodel.coefficients import load_step_time
from millrace.enginemodel.parameters import EngineParameters
from millrace.workloads.lengths import load_fitted

from bench.scenarios.rows import Row
from bench.scenarios.runs import Job, Options, add_options, options, run_all
from bench.scenarios.scenarios import scenario
from bench.scenarios.tables import figure, table
from papers.ares.bench.levelling import Fleet, FleetOutcome, FleetShape, random_placement_cv
from papers.ares.bench.rescheduled import rescheduling
from papers.ares.bench.tables import against, rows_table
from papers.ares.bench.variants import VARIANTS

RATE = 0.0375
COUNTS = (8, 16, 32, 64, 128, 256)
#: Factor on the lengths of requests; the rate rises with its square, so that instances hold as many tokens.
SHARES = (1.0, 0.5, 0.25, 0.125, 0.0625)
RUNNING_COUNT = 32
NAMES = ("none", "reactive", "ares, oracle")
#: Rule, and whether it makes one move a second or one for each eight instances.
RULES = {
    "none": ("none", False),
    "reactive": ("reactive", True),
    "ares, 1 move/s": ("ares", False),
    "ares": ("ares", True),
}
STEP_TIME = "rtx4090d-qwen-7b-w8a8"
#: Loads are told less often where many hear them.
LIMITS = "trading.limits={tick_ms=1000, load_ms=2000, load_age_ms=5000, horizon_ms=60000}"
SECONDS = 1_200
#: One instance prefills for so many that decode.
DECODE_PER_PREFILL = 16


def main() -> int:
    """Runs the parts and prints tables; fails where a request was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, requests=0, seeds=5)
    parts = ("instances", "running", "cluster")
    parser.add_argument("--parts", nargs="+", choices=parts, default=["instances", "running"])
    parser.add_argument("--counts", nargs="+", type=int, default=COUNTS, help="decode instances")
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES, help="of the lengths")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="of arrivals; --requests is not used")
    arguments = parser.parse_args()
    chosen = options(arguments)
    if "instances" in arguments.parts:
        print(
            f"{RATE} requests/s per instance; seeds 0 to {chosen.seeds - 1}; the second half of {arguments.seconds} s\n"
        )
        cases = [(f"{count} instances", FleetShape(count=count, rate_per_s=RATE)) for count in arguments.counts]
        print(_fleets(cases, arguments.seconds, chosen.seeds))
    if "running" in arguments.parts:
        print(f"\n{RUNNING_COUNT} instances, requests shorter and more often\n")
        shapes = [
            (f"lengths x {share:g}", FleetShape(count=RUNNING_COUNT, rate_per_s=RATE / share**2, output_scale=share))
            for share in arguments.shares
        ]
        print(_fleets(shapes, arguments.seconds, chosen.seeds))
    if "cluster" not in arguments.parts:
        return 0
    jobs = _jobs(chosen, min(arguments.counts), 1.0, arguments.seconds)
    return int(_told(run_all(jobs, chosen), f"a cluster with brokers, {RATE}/s per instance", chosen.seeds) > 0)


def _fleets(cases: Sequence[tuple[str, FleetShape]], seconds: int, seeds: int) -> str:
    heads = [
        "",
        "running",
        "load sd %",
        "random %",
        "variance %",
        "TPOT ms",
        "against none %",
        "p99 ms",
        "p99 %",
        "moves/s each",
    ]
    lines = []
    for label, shape in cases:
        found = {name: [_fleet(shape, name, seconds, seed) for seed in range(seeds)] for name in RULES}
        lines += [[f"{label}, {name}", *_cells(own, found["none"])] for name, own in found.items()]
    return table(heads, lines)


def _fleet(shape: FleetShape, name: str, seconds: int, seed: int) -> FleetOutcome:
    rule, many = RULES[name]
    moves_max = max(1, shape.count // 8) if many else 1
    cost = load_step_time(STEP_TIME).cost(EngineParameters(max_model_len=40_960, blocks_total=13_500))
    run = msgspec.structs.replace(shape, rule=rule, moves_max=moves_max, seconds=seconds, seed=seed)
    return Fleet(run, cost, load_fitted("reasoning-sharegpt")).run()


def _cells(own: Sequence[FleetOutcome], none: Sequence[FleetOutcome]) -> list[str]:
    pairs = list(zip(own, none, strict=True))
    return [
        figure([each.running for each in own], places=1),
        figure([100 * sqrt(each.variance) / each.load for each in own], places=1),
        f"{100 * random_placement_cv(own):.1f}",
        figure([100 * (a.variance / b.variance - 1) for a, b in pairs], places=1),
        figure([each.tpot_ms for each in own], places=2),
        figure([100 * (a.tpot_ms / b.tpot_ms - 1) for a, b in pairs], places=1),
        figure([each.tpot_p99_ms for each in own], places=1),
        figure([100 * (a.tpot_p99_ms / b.tpot_p99_ms - 1) for a, b in pairs], places=1),
        figure([each.moves_per_s for each in own], places=3),
    ]


def _told(rows: Sequence[Row], title: str, seeds: int) -> int:
    print(f"\n{title}; seeds 0 to {seeds - 1}; the first half of the requests is warm-up\n")
    print(rows_table(rows))
    print(f"\n{against(rows, 'none')}")
    return sum(row.lost for row in rows)


def _jobs(chosen: Options, count: int, share: float, seconds: int) -> list[Job]:
    rate = RATE * count / share
    requests = max(2, round(rate * seconds))
    groups = {
        "cluster.groups.1.instances": count,
        "cluster.groups.0.instances": max(1, count // DECODE_PER_PREFILL),
        "workload.count": requests,
        "workload.warm_up": requests // 2,
        "workload.arrivals.rate_per_s": rate,
    }
    size = [*(f"{key}={value}" for key, value in groups.items()), LIMITS]
    if share < 1:
        size.append(f"workload.models={{modelled={{share=1.0, output_scale={share}}}}}")
    specs = [(name, scenario("ares", [*size, *VARIANTS[name]])) for name in NAMES]
    return [job for name, spec in specs for job in chosen.variations(name, rate, spec, rescheduling)]
