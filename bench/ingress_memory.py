"""Memory of one ingress over an hour's worth of requests: 180,000 short ones, as 50 a second would be.

They are sent as fast as they go. Read the last lines: what still grows there grows for ever.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from bench.ingress_throughput import loads, measure
from tests.testbed.local_cluster import ClusterOptions, LocalCluster

REQUESTS = 50 * 3600


def main() -> int:
    """Sends them in rounds and prints the resident memory after each."""
    parser = argparse.ArgumentParser(prog="python -m bench ingress_memory", description=__doc__)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--round-seconds", type=float, default=15.0)
    parser.add_argument("--limit-seconds", type=float, default=540.0, help="ends early after so long")
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        options = ClusterOptions(
            folder=Path(folder), workers=2, speed=0.0, ingress_cores=(cores[0],), other_cores=(cores[-1],)
        )
        with LocalCluster(options) as cluster:
            sent, until_s = 0, time.monotonic() + arguments.limit_seconds
            print(line(cluster, sent), flush=True)
            while sent < arguments.requests and time.monotonic() < until_s:
                load = loads(cluster.port, arguments.round_seconds)["short, 4 tokens, whole"]
                sent += measure(cluster, "memory", load, cores[-1], "")["requests"]
                print(line(cluster, sent), flush=True)
    return 0


def line(cluster: LocalCluster, sent: int) -> str:
    """Resident memory of every process."""
    sizes = ", ".join(f"{name} {cluster.resident_bytes(name) / 2**20:.0f}" for name in cluster.processes)
    return f"after {sent} requests, MiB: {sizes}"


if __name__ == "__main__":
    sys.exit(main())
