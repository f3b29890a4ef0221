"""Prefill and decode on modelled H200 of their own against the same four colocated: TTFT, TPOT, SLO kept, by rate.

    python -m bench disaggregation_sim --rows FILE

`examples/scenarios/disaggregated.toml` as it is, with migration on (two instances prefill, two decode) and off, at each
rate; what the network and the freeze cost is in it. The SLO is the scenario's: TTFT within 1 s, mean TPOT within 15 ms.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from bench.scenarios.rows import Row
from bench.scenarios.runs import Job, Options, add_options, options, run_all
from bench.scenarios.scenarios import scenario
from bench.scenarios.tables import figure, table

RATES = (12.0, 24.0, 36.0)
LAYOUTS = {"apart": "true", "colocated": "false"}
COLUMNS: tuple[tuple[str, Callable[[Row], float | None], int], ...] = (
    ("TTFT mean s", lambda row: row.ttft_mean, 2),
    ("TTFT p99 s", lambda row: row.ttft_p99, 2),
    ("TPOT mean ms", lambda row: _scaled(row.tpot_mean, 1e3), 1),
    ("TPOT p99 ms", lambda row: _scaled(row.tpot_p99, 1e3), 1),
    ("e2e mean s", lambda row: row.e2e_mean, 2),
    ("e2e p99 s", lambda row: row.e2e_p99, 1),
    ("within SLO %", lambda row: _scaled(row.goodput, 100), 1),
    ("moved", lambda row: row.moved or None, 0),
    ("frozen p50 ms", lambda row: _scaled(row.frozen_p50, 1e3), 1),
)


def main() -> int:
    """Runs both layouts at each rate and prints a table; fails where a request was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, requests=1_000, seeds=5)
    parser.add_argument("--rates", nargs="+", type=float, default=RATES, help="requests/s")
    arguments = parser.parse_args()
    chosen = options(arguments)
    rows = run_all([job for rate in arguments.rates for job in _jobs(chosen, rate)], chosen)
    print(f"{chosen.told}; the first tenth of each is warm-up")
    print(_table(rows))
    return int(any(row.lost for row in rows))


def _jobs(chosen: Options, rate: float) -> list[Job]:
    size = [f"workload.count={chosen.requests}", f"workload.warm_up={chosen.requests // 10}"]
    jobs: list[Job] = []
    for layout, on in LAYOUTS.items():
        settings = [*size, f"migration.on={on}", f"workload.arrivals.rate_per_s={rate}"]
        jobs += chosen.variations(layout, rate, scenario("disaggregated", settings))
    return jobs


def _table(rows: Sequence[Row]) -> str:
    lines = []
    for rate, label in dict.fromkeys((row.rate, row.label) for row in rows):
        own = [row for row in rows if (row.rate, row.label) == (rate, label)]
        lines.append([f"{rate:g}/s, {label}", *(_cell(own, value, places) for _, value, places in COLUMNS)])
    return table(["", *(head for head, _, _ in COLUMNS)], lines)


def _cell(rows: Sequence[Row], value: Callable[[Row], float | None], places: int) -> str:
    return figure([known for row in rows if (known := value(row)) is not None], places=places)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else factor * value
