"""Pause of a stream whose engine dies, with and without KV replicas, with H200 step times, contexts to 128K, simulated.

Three modelled engines (Llama-3-8B on an H200, KV 131,072 bytes a token) under the services' own actors in virtual time,
some sequences decoding on each. A watched stream decodes for a while, then its engine fails under its worker; the pause
is the longest interval between two of its tokens from then on, the tail what a continuation had to compute. Links
have ``--gbps``; a copy costs the engines no time, as with a network card. Step times were fitted to contexts up to
8,192 tokens; beyond, they are extrapolated.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from millrace.sim.runtime_sim import MILLISECOND, SECOND

from bench.watched_cluster import ENDLESS, ENGINE, WatchedCluster

#: The watched stream decodes so long before its engine fails, seconds: several rounds.
DECODES_S = 8


@dataclass(slots=True)
class Crashes:
    """Results of one (context, replicas). Milliseconds and tokens."""

    pauses: list[float] = field(default_factory=list)
    usual: list[float] = field(default_factory=list)
    tails: list[float] = field(default_factory=list)


class CrashStage(WatchedCluster):
    """Three engines with others that decode, and one watched stream."""

    def __init__(self, options: argparse.Namespace, *, replicas: bool, seed: int) -> None:
        table: dict[str, Any] = {
            "seed": seed,
            "cluster": {"groups": [{"name": "e", "instances": 3, "step_time": "h200-llama-3-8b", "engine": ENGINE}]},
            "dispatch": {"policy": "join_shortest_queue"},
            "prediction": {"kind": "none"},
            "intervals": {"status_ms": 20, "summary_ms": 25, "token_ms": 0, "run_ms": 0},
            "migration": {"on": True, "bandwidth_gbps": options.gbps, "replicas": {"enabled": replicas}},
        }
        table["migration"]["replicas"]["bytes_per_s"] = int(options.gbps * 1e9 / 8 / 4)
        super().__init__(table)
        self.begin(3 * options.others)

    def crash(self, context: int, cell: Crashes) -> None:
        """Starts a stream of this context and lets its engine fail."""
        simulation, engines = self.cluster.simulation, self.cluster.engines
        request = self.submit(context, ENDLESS)
        self.until(request, 2)
        simulation.run_for(DECODES_S * SECOND + simulation.rng.randrange(500 * MILLISECOND))
        source = next(name for name, engine in engines.items() if engine.engine.find(f"{request}.0") is not None)
        begun, failed_ns = len(self.times(request)), simulation.now_ns
        engines[source].fail("killed by the bench")
        self.until(request, begun + 20)
        times = self.times(request)
        gaps = [(later - earlier) / 1e6 for earlier, later in pairwise(times) if later >= failed_ns]
        cell.pauses.append(max(gaps))
        cell.usual.append(statistics.median((b - a) / 1e6 for a, b in pairwise(times[:begun])))
        actor: Any = self.cluster.ingresses[0].actor
        counted = actor.state.metrics  # of all sequences of that engine
        continued = counted.replica_continuations
        cell.tails.append(counted.replica_tail_tokens / continued if continued else context + begun)


def row(context: int, cell: Crashes, *, on: bool) -> str:
    """One line."""
    pauses = " ".join(f"{pause:.0f}" for pause in sorted(cell.pauses))
    return (
        f"  {context:7}  {'on' if on else 'off':8}  {statistics.median(cell.pauses):9.0f}  {pauses:28}"
        f"  {statistics.median(cell.usual):6.1f}  {statistics.median(cell.tails):11.0f}"
    )


def main() -> int:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[500, 2_000, 7_000, 32_000, 128_000])
    parser.add_argument("--others", type=int, default=8, help="that decode on each engine")
    parser.add_argument("--gbps", type=float, default=100.0, help="of each link; replicas may take a quarter")
    parser.add_argument("--crashes", type=int, default=3, help="per row, each in a cluster of its own")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"three engines, {options.others} others on each, {options.gbps:.0f} Gb/s, seed {options.seed}")
    print("  context  replicas  pause ms   each                          usual  tail tokens")
    for context in options.contexts:
        for on in (False, True):
            cell = Crashes()
            for number in range(options.crashes):
                CrashStage(options, replicas=on, seed=options.seed + number).crash(context, cell)
            print(row(context, cell, on=on), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
