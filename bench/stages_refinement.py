"""Refinement of stage boundaries while lengths drift: by quality, by the paper's formula, by memory, by number.

    python -m bench stages_refinement --rows FILE

The cluster begins with the sequences that one stage holds, so that the layout of ``exact`` fits the end of the run, not
its beginning (traces of short requests begin empty). Each method moves the same cuts. With ``--drift`` lengths change
in the run, and the cuts are those of its beginning and end: prompts shrink to 0.3 times, outputs grow to 1.6 times, and
back.
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

#: Parts of a run, as many requests in each.
DRIFT = [
    {"share": 1, "prompt_scale": prompt, "output_scale": output}
    for prompt, output in ((1.0, 1.0), (0.65, 1.3), (0.3, 1.6), (0.65, 1.3), (1.0, 1.0))
]


def main() -> int:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, seeds=3)
    parser.add_argument("--kappa", type=float, default=0.2)
    parser.add_argument("--drift", action="store_true", help="lengths change in the run")
    parser.add_argument("--longer", type=int, default=1, help="times the requests of a run (default %(default)s)")
    parser.add_argument("--trace", choices=list(TRACES), default="R1")
    arguments = parser.parse_args()
    requests = arguments.longer * TRACES[arguments.trace].requests
    changes = {"workload": {"phases": DRIFT}} if arguments.drift else {}
    setup = Setup(trace=arguments.trace, kappa=arguments.kappa, requests=requests, changes=changes)
    chosen = options(arguments)
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
