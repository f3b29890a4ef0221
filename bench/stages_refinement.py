"""Refinement of stage boundaries while lengths drift: by quality, by the paper's formula, by memory, by number.

    python -m bench stages_refinement --rows FILE

The cluster begins with the sequences that one stage holds, so that the layout of ``exact`` fits the end of the run, not
its beginning (traces of short requests begin empty). Each method moves the same cuts.
Source: CascadeInfer, section 6.5 (memory-based 21 percent slower, quantity-based worst).
"""

from __future__ import annotations

import argparse
import sys

from millrace.policies.stages.refinement import RefinementMethod

from bench.stages.runs import add_options, options, run_all
from bench.stages.setups import TRACES, Setup, told
from bench.stages.tables import comparison
from bench.stages.variants import BASELINES, Layer, full


def main() -> int:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, seeds=3)
    parser.add_argument("--kappa", type=float, default=0.2)
    parser.add_argument("--trace", choices=list(TRACES), default="R1")
    arguments = parser.parse_args()
    chosen, setup = options(arguments), Setup(trace=arguments.trace, kappa=arguments.kappa)
    shapes = setup.planned("exact")
    print(f"{setup.trace}, kappa {setup.kappa:g}, {setup.rate_per_s():.1f} requests/s; planned: {told(shapes)}")
    layers: dict[str, Layer] = {"one stage": BASELINES["shortest queue"], "planned cuts": full(shapes)}
    layers |= {str(method): full(shapes, refinement={"method": str(method)}) for method in RefinementMethod}
    # The default method is what `stages_headline` runs too: the same tables, so that the rows are shared.
    layers["weighted"] = full(shapes, refinement={})
    rows = run_all(chosen.jobs({label: setup.spec(layer) for label, layer in layers.items()}), chosen)
    print(comparison(rows, "memory"), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
