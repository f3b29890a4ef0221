"""Variance of load over 8 to 256 decode instances, and what rescheduling gains by how many requests each runs.

    python -m bench ares_scale --rows FILE
    python -m bench ares_scale --rows FILE --parts running

Parts: ``instances``: ARES's figure 12, 0.0375 requests/s per instance, 25 Gb/s, rests known exactly; nobody moves,
reactive, ARES between brokers. ``running``: eight instances whose outputs are shorter and come more often, so that each
runs more of them at the same load in tokens. Beside the measured deviation of loads stands what random placement would
give, sqrt((1 + c²) / n), where n requests run per instance and c is the coefficient of variation of their lengths at
random times. Aim: variance at least 50 % lower. The source's variance of execution times is that of tokens, times the
square of what one costs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from bench.block.rows import Row
from bench.block.runs import Job, Options, add_options, options, run_all
from bench.block.scenarios import scenario
from bench.moving.tables import against, rows_table
from bench.moving.variants import VARIANTS

RATE = 0.0375
COUNTS = (8, 16, 32)
#: Factor on the lengths of outputs, and its inverse on the rate.
SHARES = (1.0, 0.25, 0.0625)
NAMES = ("none", "reactive", "ares, oracle")
#: Loads are told less often where many hear them.
LIMITS = "trading.limits={tick_ms=1000, load_ms=2000, load_age_ms=5000, horizon_ms=60000}"
SECONDS = 1_200
#: One instance prefills for so many that decode.
DECODE_PER_PREFILL = 16


def main() -> int:
    """Runs the parts and prints tables; fails where a request was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, requests=0, seeds=2)
    parser.add_argument("--parts", nargs="+", choices=("instances", "running"), default=["instances", "running"])
    parser.add_argument("--counts", nargs="+", type=int, default=COUNTS, help="decode instances")
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES, help="of the lengths of outputs")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="of arrivals; --requests is not used")
    arguments = parser.parse_args()
    chosen = options(arguments)
    lost = 0
    if "instances" in arguments.parts:
        jobs = [job for count in arguments.counts for job in _jobs(chosen, count, 1.0, arguments.seconds)]
        lost += _told(run_all(jobs, chosen), f"decode instances, {RATE}/s each", chosen.seeds)
    if "running" in arguments.parts:
        jobs = [job for share in arguments.shares for job in _jobs(chosen, 8, share, arguments.seconds)]
        lost += _told(run_all(jobs, chosen), "eight instances, outputs shorter and more often", chosen.seeds)
    return int(lost > 0)


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
    return [
        job
        for name in NAMES
        for job in chosen.variations(name, rate, scenario("rescheduling", [*size, *VARIANTS[name]]))
    ]
