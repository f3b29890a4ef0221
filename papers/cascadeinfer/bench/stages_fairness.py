"""Cost of length stages to each decile of the total length: normalised latency, against one stage.

    python -m bench stages_fairness --rows FILE

R1 lengths on modelled H200, planned by ``exact``, refined boundaries, trading. Aim: no decile above 1 + phi = 1.5
times what one stage gives it.
"""

from __future__ import annotations

import argparse
import sys

from bench.scenarios.tables import figure, table
from papers.cascadeinfer.bench.stages.runs import StageRow, add_options, options, run_all
from papers.cascadeinfer.bench.stages.setups import Setup, told
from papers.cascadeinfer.bench.stages.tables import paired
from papers.cascadeinfer.bench.stages.variants import BASELINES, full


def main() -> int:
    """Prints one table per kappa."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, seeds=3)
    parser.add_argument("--kappas", nargs="+", type=float, default=[0.2])
    arguments = parser.parse_args()
    chosen = options(arguments)
    for kappa in arguments.kappas:
        setup = Setup(kappa=kappa)
        shapes = setup.planned("exact")
        layers = {"one stage": BASELINES["shortest queue"], "stages": full(shapes, refinement={})}
        rows = run_all(chosen.jobs({label: setup.spec(layer) for label, layer in layers.items()}), chosen)
        print(
            f"\nR1, kappa {kappa:g}, {setup.rate_per_s():.1f} requests/s; planned: {told(shapes)}; ms/token by decile"
        )
        print(table(["decile", "one stage", "stages", "ratio"], [_line(rows, decile) for decile in range(10)]))
    return 0


def _line(rows: list[StageRow], decile: int) -> list[str]:
    pairs = paired(rows, "stages", "one stage", lambda row: row.deciles[decile])
    ours, theirs = [1e3 * a for a, _ in pairs], [1e3 * b for _, b in pairs]
    return [str(decile + 1), figure(theirs), figure(ours), figure([a / b for a, b in pairs])]


if __name__ == "__main__":
    sys.exit(main())
