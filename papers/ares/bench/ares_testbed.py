"""ARES's testbed: one instance prefills, three decode reasoning outputs; nobody moves, reactive, by future load.

    python -m bench ares_testbed --rows FILE
    python -m bench ares_testbed --rows FILE --rates 0.26 --variants none reactive "ares, oracle"
    python -m bench ares_testbed --rows FILE --rates 0.56 --scale 0.25 --requests 300

`papers/ares/testbed.toml`: step times by two anchors of the paper, lengths by its table 2, 25 Gb/s.
Rests are known exactly (oracle), with the error of a trained head as `bench remaining` measured it on millrace-mini
(head), or as the median of those that ended before (survival). SLO: TTFT within 4 s, mean TPOT within 30 ms.
``--scale 0.25`` plays outputs of a quarter of the length four times as often, on a quarter of the memory: more of them
come and go in less time. Aims: TPOT p99 of reactive at most half of none's and ARES's below it; 1.5 times the goodput;
at most 5 % of the preemptions.
"""

from __future__ import annotations

import argparse

from bench.scenarios.runs import Job, Options, add_options, options, run_all
from bench.scenarios.scenarios import scenario
from papers.ares.bench.rescheduled import rescheduling
from papers.ares.bench.tables import against, rows_table
from papers.ares.bench.variants import VARIANTS

RATES = (0.17, 0.26)
#: Of the requests of a run, the first quarter fills the cluster: the longest outputs run for ten minutes.
WARM_UP = 4
#: KV blocks of each instance of the scenario.
BLOCKS = 13_500


def main() -> int:
    """Runs the variants at each rate and prints tables; fails where a request was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, requests=400, seeds=5)
    parser.add_argument("--rates", nargs="+", type=float, default=RATES, help="requests/s")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--scale", type=float, default=1.0, help="of outputs and memory; rates are divided by it")
    arguments = parser.parse_args()
    chosen = options(arguments)
    jobs = [
        job
        for rate in arguments.rates
        for name in arguments.variants
        for job in _jobs(chosen, rate, name, arguments.scale)
    ]
    rows = run_all(jobs, chosen)
    print(f"{chosen.told}; the first quarter of each is warm-up\n")
    print(rows_table(rows))
    for baseline in ("none", "reactive"):
        if baseline in arguments.variants and len(arguments.variants) > 1:
            print(f"\n{against(rows, baseline)}")
    return int(any(row.lost for row in rows))


def _jobs(chosen: Options, rate: float, name: str, scale: float) -> list[Job]:
    size = [f"workload.count={chosen.requests}", f"workload.warm_up={chosen.requests // WARM_UP}"]
    if scale != 1:
        size.append(f"workload.models={{modelled={{share=1.0, output_scale={scale}}}}}")
        size += [f"cluster.groups.{group}.engine.blocks_total={round(BLOCKS * scale)}" for group in (0, 1)]
    spec = scenario("ares", [*size, f"workload.arrivals.rate_per_s={rate / scale}", *VARIANTS[name]])
    return chosen.variations(name, rate, spec, rescheduling)
