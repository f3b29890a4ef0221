"""Choice of the decoder at a hand-off: most idle memory, nearest machine, or least delay, on alike and unlike decoders.

    python -m bench handoff_pairs --rows FILE

`examples/scenarios/disaggregated.toml` with two instances that prefill and four that decode: all alike; two of them at
half the speed; or two on the machine of the prefills and two behind a network of 10 Gb/s.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import msgspec

from bench.scenarios.rows import Row
from bench.scenarios.runs import Job, Options, add_options, options, run_all
from bench.scenarios.scenarios import scenario
from bench.scenarios.tables import figure, table
from simulator.scenarios.spec import ScenarioSpec

POLICIES = ("most_idle", "nearest", "least_delay")
LAYOUTS = ("alike", "two at half the speed", "two behind 10 Gb/s")
COLUMNS: tuple[tuple[str, Callable[[Row], float | None], float, int], ...] = (
    ("TTFT mean s", lambda row: row.ttft_mean, 1, 2),
    ("TPOT mean ms", lambda row: row.tpot_mean, 1e3, 2),
    ("TPOT p99 ms", lambda row: row.tpot_p99, 1e3, 2),
    ("e2e mean s", lambda row: row.e2e_mean, 1, 3),
    ("e2e p99 s", lambda row: row.e2e_p99, 1, 2),
    ("within SLO %", lambda row: row.goodput, 100, 1),
    ("moved", lambda row: row.moved or None, 1, 0),
)


def main() -> int:
    """Runs each layout with each policy and prints a table; fails where a request was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, requests=1_000, seeds=5)
    parser.add_argument("--rate", type=float, default=24.0, help="requests/s (default %(default)s)")
    arguments = parser.parse_args()
    chosen = options(arguments)
    rows = run_all([job for layout in LAYOUTS for job in _jobs(chosen, arguments.rate, layout)], chosen)
    print(f"{chosen.told}; the first tenth of each is warm-up")
    print(_table(rows))
    return int(any(row.lost for row in rows))


def _jobs(chosen: Options, rate: float, layout: str) -> list[Job]:
    size = [f"workload.count={chosen.requests}", f"workload.warm_up={chosen.requests // 10}"]
    jobs: list[Job] = []
    for policy in POLICIES:
        settings = [*size, f"workload.arrivals.rate_per_s={rate}", f"migration.target.policy={policy}"]
        jobs += chosen.variations(f"{layout}: {policy}", rate, spec_of(layout, settings))
    return jobs


def spec_of(layout: str, settings: Sequence[str]) -> ScenarioSpec:
    """The scenario of a layout."""
    far = ["migration.bandwidth_gbps=10.0"] if layout == LAYOUTS[2] else []
    spec = scenario("disaggregated", [*settings, *far])
    replace = msgspec.structs.replace
    prefill, first = spec.cluster.groups
    second = replace(first, name="others", speed=0.5 if layout == LAYOUTS[1] else 1.0)
    if layout == LAYOUTS[2]:
        prefill, first = replace(prefill, host="rack"), replace(first, host="rack")
    roles = spec.migration.roles | {"others": spec.migration.roles["decode"]}
    cluster = replace(spec.cluster, groups=(prefill, first, second))
    return replace(spec, cluster=cluster, migration=replace(spec.migration, roles=roles))


def _table(rows: Sequence[Row]) -> str:
    lines = []
    for label in dict.fromkeys(row.label for row in rows):
        own = [row for row in rows if row.label == label]
        cells = [_cell(own, value, factor, places) for _, value, factor, places in COLUMNS]
        lines.append([label, *cells])
    return table(["", *(head for head, *_ in COLUMNS)], lines)


def _cell(rows: Sequence[Row], value: Callable[[Row], float | None], factor: float, places: int) -> str:
    return figure([known * factor for row in rows if (known := value(row)) is not None], places=places)


if __name__ == "__main__":
    raise SystemExit(main())
