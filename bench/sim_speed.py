"""Speed of scenarios: 12 instances x 10,000 requests by policy, and 1,000 x 100,000 with --large."""

from __future__ import annotations

import argparse
import os
import resource
import time
from pathlib import Path

from millrace.enginemodel.coefficients import load_step_time

from bench.results_pages import report
from simulator.scenarios.reading import read_scenario
from simulator.scenarios.running import run_scenario
from simulator.scenarios.statistics import summarise

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "scenarios"
BLOCK = "../../papers/block/testbed.toml"
#: Label -> (scenario, settings, goal in seconds on one core).
SMALL = {
    "12 x 10,000, round robin": (BLOCK, ("dispatch.policy=round_robin",), 6),
    "12 x 10,000, join_shortest_queue": (BLOCK, ("dispatch.policy=join_shortest_queue",), 6),
    "12 x 10,000, forecast of all": (BLOCK, ("dispatch.policy=forecast", "dispatch.parameters.candidates=0"), 20),
}
LARGE = {"1,000 x 100,000, forecast of 2": ("thousand.toml", (), 1200)}


def main() -> int:
    """Runs and prints; the processor's seconds are this process's own, whatever else the machine does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=24.0, help="requests/s of the small ones (default %(default)s)")
    parser.add_argument("--large", action="store_true", help="the thousand instances too: minutes")
    options = parser.parse_args()
    folders = (Path(os.environ.get("MILLRACE_DATA", "../shared/data")),)
    wanted = {**SMALL, **LARGE} if options.large else SMALL
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"{'':<34}{'wall s':>8}{'cpu s':>8}{'goal':>6}{'messages':>12}{'per cpu s':>10}{'steps':>11}{'peak GB':>9}")
    took: dict[str, str] = {}
    for label, (file, settings, goal_s) in wanted.items():
        if label in SMALL:
            settings = (*settings, f"workload.arrivals.rate_per_s={options.rate}")
        spec = read_scenario(EXAMPLES / file, settings)
        began_s = time.process_time()
        outcome = run_scenario(spec, step_times=load_step_time, folders=folders, clock=time.perf_counter)
        cpu_s = time.process_time() - began_s
        took[label] = f"{cpu_s:.1f}"
        peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        print(
            f"{label:<34}{outcome.wall_s:>8.1f}{cpu_s:>8.1f}{goal_s:>6}{outcome.messages:>12,}"
            f"{outcome.messages / cpu_s:>10,.0f}{outcome.engine_steps:>11,}{peak_gb:>9.2f}"
        )
        summary = summarise(outcome)
        print(
            f"{'':<4}seed {spec.seed}, trace {summary.trace_hash}, {summary.rate_per_s:.1f} req/s, TTFT mean "
            f"{summary.ttft_s.mean:.3f} s, P99 {summary.ttft_s.p99:.3f} s, end to end {summary.e2e_s.mean:.2f} s"
        )
    report("small", f"{', '.join(took[label] for label in SMALL)} s of processor time")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
