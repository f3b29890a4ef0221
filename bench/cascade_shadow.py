"""Latency of a cascade's clients with and without shadow runs, on simulated clusters; and what the runs yield.

All actors are the real ones on modelled engines: three models on five instances, fixed thresholds, no faults. Each
share serves the same calls (seeds) at the same rates. A run is worth its share only where clients do not notice it.
"""

from __future__ import annotations

import argparse
from collections import Counter

import msgspec
import numpy as np
from millrace.sim.runtime_sim import SECOND

from services.ingress.config import IngressConfig
from simulator.soak.cascade_watch import CascadeWatch
from simulator.soak.cascading import CascadeSoakCluster, CascadeSoakRun, cascade_shape
from simulator.soak.cluster import SoakCluster
from simulator.soak.migration_load import ingress_state
from simulator.soak.run import SoakRun

SHARES = (0.0, 0.01, 0.05, 0.2, 1.0)
RATES = (4.0, 12.0, 30.0)


def main() -> int:
    """Print a row per rate and share."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=8)
    options = parser.parse_args()
    print(f"{'calls/s':>8}{'share':>8}{'calls':>8}{'p50 ms':>9}{'p95 ms':>9}{'finished':>10}{'given up':>10}")
    for rate in RATES:
        for share in SHARES:
            latencies: list[float] = []
            runs: Counter[str] = Counter()
            for seed in range(options.seeds):
                found, counts = _served(seed, rate, share)
                latencies += found
                runs.update(counts)
            p50, p95 = (1e3 * float(np.quantile(latencies, at)) for at in (0.5, 0.95))
            given_up = sum(runs.values()) - runs["finished"]
            row = f"{rate:>8.0f}{share:>8.0%}{len(latencies):>8}{p50:>9.1f}{p95:>9.1f}"
            print(f"{row}{runs['finished']:>10}{given_up:>10}", flush=True)
    return 0


def _served(seed: int, rate: float, share: float) -> tuple[list[float], Counter[str]]:
    """Seconds of each completed call, and shadow runs by result."""
    run = QuietRun(seed, rate=rate, share=share)
    run.run()
    exchanges = run.cluster.clients.exchanges.values()
    seconds = [(each.ended_ns - each.submitted_ns) / SECOND for each in exchanges if each.outcome == "completed"]
    return seconds, run.shadows()


class QuietRun(CascadeSoakRun):
    """A run without faults, swaps and judge."""

    def __init__(self, seed: int, *, rate: float, share: float) -> None:
        class Cluster(QuietCluster):
            shadow_share = share

        SoakRun.__init__(self, seed, shape=cascade_shape(), faults=False, rate=rate, cluster=Cluster)
        self.watch = CascadeWatch()
        self._sim.check_with(self.watch)

    def shadows(self) -> Counter[str]:
        """Shadow runs by result, of all ingresses."""
        counts: Counter[str] = Counter()
        for name, actor in self._sim.actors.items():
            if name.startswith("ingress"):
                for (_, result), count in ingress_state(actor).metrics.shadows.counts.items():
                    counts[result] += count
        return counts


class QuietCluster(CascadeSoakCluster):
    """The configured plan holds, and ingress judges by confidence."""

    shadow_share = 0.0

    def _add_actors(self) -> None:
        SoakCluster._add_actors(self)

    def _ingress(self, name: str) -> IngressConfig:
        config = super()._ingress(name)
        cascades = [msgspec.structs.replace(each, shadow_share=self.shadow_share) for each in config.cascades]
        return msgspec.structs.replace(config, cascades=cascades)
