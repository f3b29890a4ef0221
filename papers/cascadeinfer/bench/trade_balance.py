"""Balance within stages: variation of output tokens over 4 x 4 instances, with and without trading.

    python -m bench trade_balance --rows FILE

Four fixed stages of four modelled H200. The coefficient of variation is of the output tokens that the instances of one
stage make in ten seconds, over all sixteen; the paper's figure 16 has -47 percent against round robin and -40 against
hand-over alone. Source: CascadeInfer, section 6.5.
"""

from __future__ import annotations

import argparse
import itertools
import sys

from millrace.policies.stages.membership import StageShape

from papers import PAPERS
from papers.cascadeinfer.bench.stages.runs import add_options, options, run_all
from papers.cascadeinfer.bench.stages.setups import Setup, fixed, merged
from papers.cascadeinfer.bench.stages.tables import COLUMNS, against, comparison
from papers.cascadeinfer.bench.stages.variants import Layer, dispatch, trading

#: Cuts at quarters of what is resident, about: output tokens by length.
CUTS = {"R1": (1_000, 2_500, 5_000), "Mooncake": (2_896, 6_889, 13_777)}

STANDING = ["drain", "handoff", "boundary"]


def main() -> int:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, seeds=3)
    parser.add_argument("--kappa", type=float, default=0.2)
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--trace", choices=list(CUTS), default="R1")
    arguments = parser.parse_args()
    chosen = options(arguments)
    setup = Setup(trace=arguments.trace, kappa=arguments.kappa, instances=16, load=0.7, requests=arguments.requests)
    bounds = [0, *CUTS[arguments.trace], None]
    shapes = [StageShape(length_min=low or 0, length_max=high, instances=4) for low, high in itertools.pairwise(bounds)]
    stages = merged(fixed(shapes), dispatch("round_robin"))
    layers: dict[str, Layer] = {
        "round robin": dispatch("round_robin"),
        "one stage, delay": merged(dispatch("round_robin"), trading("delay")),
        "one stage, cascade": merged(dispatch("round_robin"), trading(f"{PAPERS}/cascadeinfer/trading.py")),
        "hand-over alone": merged(stages, trading("none", reasons=STANDING, refinement={})),
        "4 x 4, cascade": merged(stages, trading(f"{PAPERS}/cascadeinfer/trading.py", refinement={})),
        "4 x 4, delay": merged(stages, trading("delay", refinement={})),
    }
    rows = run_all(chosen.jobs({label: setup.spec(layer) for label, layer in layers.items()}), chosen)
    print(f"{setup.trace}, kappa {setup.kappa:g}, {setup.rate_per_s():.1f} requests/s on 16 instances")
    columns = (("output cv", lambda row: row.output_cv, 3), *COLUMNS)
    print(comparison(rows, "round robin", columns))
    print("output cv, % of round robin, paired by seed:")
    for label in layers:
        told = against(rows, label, "round robin", lambda row: row.output_cv)
        print(f"  {label:<20}{told}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
