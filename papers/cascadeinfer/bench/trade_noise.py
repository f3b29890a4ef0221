"""Trading on wrong predictions and old loads: never more than 2 percent worse than not moving.

    python -m bench trade_noise --rows FILE

Trading for balance (policy ``delay``) in one stage, against the same runs without moves. Noise is that of the length
prediction (truth times a normal number around 1 with sigma); old loads are told so seldom, and count for three times as
long.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from papers.cascadeinfer.bench.stages.runs import add_options, options, run_all
from papers.cascadeinfer.bench.stages.setups import Setup, merged
from papers.cascadeinfer.bench.stages.tables import comparison
from papers.cascadeinfer.bench.stages.variants import Layer, trading

SIGMAS = (0.0, 0.5, 1.0, 2.0)
AGES_MS = (2_000, 5_000)

#: Lengths are asked for though the dispatcher does not look at them.
TAGGED = {"dispatch": {"stage_by": "expected"}}


def main() -> int:
    """Prints one table per workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, seeds=3)
    parser.add_argument("--traces", nargs="+", default=["R1", "ShareGPT"])
    parser.add_argument("--dispatch", default="join_shortest_queue")
    parser.add_argument("--load", type=float, default=0.8)
    parser.add_argument("--instances", type=int, default=4)
    parser.add_argument("--requests", type=int, default=0)
    arguments = parser.parse_args()
    chosen = options(arguments)
    for trace in arguments.traces:
        setup = Setup(
            trace=trace,
            instances=arguments.instances,
            load=arguments.load,
            requests=arguments.requests,
            changes={"dispatch": {"policy": arguments.dispatch}},
        )
        specs = {label: setup.spec(layer) for label, layer in layers().items()}
        print(f"\n{trace}, kappa {setup.kappa:g}, {setup.rate_per_s():.1f} requests/s on {setup.instances} instances")
        print(comparison(run_all(chosen.jobs(specs), chosen), "no moves"), flush=True)
    return 0


def layers() -> dict[str, Layer]:
    """Return the layers: what is known, and how late."""
    found: dict[str, Layer] = {"no moves": {}, "nothing known": trading("delay")}
    for sigma in SIGMAS:
        known: Mapping[str, Any] = {"prediction": {"kind": "noisy", "sigma": sigma}}
        found[f"sigma {sigma:g}"] = merged(merged(trading("delay"), known), TAGGED)
    for age_ms in AGES_MS:
        slow = {"trading": {"limits": {"load_ms": age_ms, "load_age_ms": 3 * age_ms}}}
        found[f"loads {age_ms / 1e3:g} s old"] = merged(trading("delay"), slow)
    return found


if __name__ == "__main__":
    sys.exit(main())
