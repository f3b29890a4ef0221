"""Layouts of length stages on the same runs: none, chain, the paper's heuristic, exact, and arrival only.

    python -m bench stages_layouts --rows FILE

R1 lengths on modelled H200. Each layout has hand-over, refined boundaries and trading within a stage, and begins with
the sequences of one stage; with ``--planned`` cuts stay where the planner has them, nothing is traded, and each begins
with the sequences of its own steady state. ``arrival only`` places by the predicted final length (the truth) and moves
nobody. The order of the paper's figure 14 is: chain worst, then none, then its own. Source: CascadeInfer, section 6.4.
"""

from __future__ import annotations

import argparse
import sys

from millrace.policies.stages.membership import StageShape

from papers.cascadeinfer.bench.stages.runs import add_options, options, run_all
from papers.cascadeinfer.bench.stages.setups import Setup, merged, told
from papers.cascadeinfer.bench.stages.tables import comparison
from papers.cascadeinfer.bench.stages.variants import BASELINES, Layer, arrival_only, full, hand_over


def main() -> int:
    """Prints one table per kappa."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, seeds=3)
    parser.add_argument("--kappas", nargs="+", type=float, default=[0.0, 0.2, 0.76])
    parser.add_argument("--instances", type=int, default=8)
    parser.add_argument("--load", type=float, default=0.8, help="share of the fluid bound (default %(default)s)")
    parser.add_argument("--planned", action="store_true", help="cuts as planned, each from its own steady state")
    arguments = parser.parse_args()
    chosen = options(arguments)
    for kappa in arguments.kappas:
        setup = Setup(kappa=kappa, instances=arguments.instances, load=arguments.load)
        layers: dict[str, Layer] = {"none": BASELINES["shortest queue"]}
        print(f"\nR1, kappa {kappa:g}, {setup.rate_per_s():.1f} requests/s on {setup.instances} instances")
        for planner in ("chain", "two_phase", "exact"):
            shapes = setup.planned(planner)
            print(f"  {planner}: {told(shapes)}")
            layers[planner] = _planned(setup, shapes) if arguments.planned else full(shapes, refinement={})
        layers["arrival only"] = arrival_only(setup.planned("exact"))
        rows = run_all(chosen.jobs({label: setup.spec(layer) for label, layer in layers.items()}), chosen)
        print(comparison(rows, "none"), flush=True)
    return 0


def _planned(setup: Setup, shapes: tuple[StageShape, ...]) -> Layer:
    return merged(hand_over(shapes), setup.begun(shapes))


if __name__ == "__main__":
    sys.exit(main())
