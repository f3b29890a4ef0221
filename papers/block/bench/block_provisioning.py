"""Block's auto-provisioning: 24 requests/s at 6 simulated A30, preempt and relief against 10 from the beginning.

    python -m bench block_provisioning --rows FILE

An instance is added when a latency passes 70 s: the predicted one (preempt) or a measured one (relief). All dispatch by
forecast, with true lengths. Instances are the supervisor's own, with a cold start. Block's figures: P99 of the
end-to-end time 89.2 s (relief) and 71.2 s (preempt), requests over 70 s 627 and 129 (of 10,000).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from bench.scenarios.rows import SLOW_S, Row
from bench.scenarios.runs import Options, add_options, options, run_all
from bench.scenarios.scenarios import FRESH, scenario, stand_in
from bench.scenarios.tables import figure, table
from papers.block.bench.variants import policy_settings
from simulator.scenarios.spec import ScenarioSpec

RATE = 24.0
FIRST, MOST = 6, 10


def main() -> int:
    """Runs all cases and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, requests=10_000, seeds=3)
    parser.add_argument("--rate", type=float, default=RATE, help="requests/s (default %(default)s)")
    parser.add_argument("--threshold", type=float, default=SLOW_S, help="s (default %(default)s)")
    parser.add_argument("--cold-start", type=float, nargs="+", default=[30.0, 2.0], help="s (default %(default)s)")
    parser.add_argument("--most", type=int, default=MOST, help="instances there may be (default %(default)s)")
    parser.add_argument("--static", type=int, nargs="*", default=[FIRST, MOST], help="fixed sizes (default 6 and 10)")
    arguments = parser.parse_args()
    chosen = options(arguments)
    specs = dict(_specs(arguments, chosen))
    note = stand_in(next(iter(specs.values())))
    if note:
        print(note)
    rows = run_all([job for label, spec in specs.items() for job in chosen.variations(label, RATE, spec)], chosen)
    print(f"{chosen.told}; {arguments.rate:g}/s, threshold {arguments.threshold:g} s, no scaling in")
    print(_table(list(specs), rows))
    print("Block: relief P99 89.2 s, 627 over 70 s; preempt P99 71.2 s, 129 over 70 s")
    return 0


def _specs(arguments: argparse.Namespace, chosen: Options) -> Iterator[tuple[str, ScenarioSpec]]:
    """Fixed sizes, then each strategy with each cold start."""
    settings = [
        *FRESH,
        *policy_settings("forecast", 0.0),
        f"workload.count={chosen.requests}",
        f"workload.arrivals.rate_per_s={arguments.rate}",
    ]
    for instances in arguments.static:
        yield (
            f"static {instances}",
            scenario("block", [*settings, f"cluster.groups.0.instances={instances}"]),
        )
    for cold_start_s in arguments.cold_start:
        for strategy in ("relief", "preempt"):
            growing = [
                f"cluster.groups.0.instances={FIRST}",
                f"provisioning.strategy={strategy}",
                f"cluster.cold_start_s={cold_start_s}",
                f"provisioning.parameters.threshold_s={arguments.threshold}",
                f"provisioning.parameters.instances_min={FIRST}",
                f"provisioning.parameters.instances_max={arguments.most}",
                "provisioning.parameters.low_utilisation=0.0",
            ]
            yield f"{strategy}, cold start {cold_start_s:g} s", scenario("block", [*settings, *growing])


def _table(labels: Sequence[str], rows: Sequence[Row]) -> str:
    heads = [
        "",
        "e2e mean s",
        "e2e p99 s",
        f"over {SLOW_S:g} s",
        "TTFT p99 s",
        "instances",
        "instance-seconds",
        "req/s",
    ]
    lines = []
    for label in labels:
        own = [row for row in rows if row.label == label]
        lines.append(
            [
                label,
                figure([row.e2e_mean for row in own], places=1),
                figure([row.e2e_p99 for row in own], places=1),
                figure([row.slow for row in own], places=0),
                figure([row.ttft_p99 for row in own], places=1),
                figure([row.instances for row in own], places=1),
                figure([row.instance_s for row in own], places=0),
                figure([row.throughput for row in own], places=2),
            ]
        )
    return table(heads, lines)
