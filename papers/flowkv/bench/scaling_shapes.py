"""Tensor parallel size for eight H200: the planner's choice against whole simulated clusters.

    python -m bench scaling_shapes --rows FILE

Llama-3.1-70B in 8 bits (published kernels of aiconfigurator): eight instances of one GPU, four of two, two of four, or
one of eight, all doing both. At a low rate steps are too long on one GPU; at a high rate all-reduces cost more than
they bring. `papers/flowkv/assignment` chooses on a sample; each shape is run as a whole cluster on other draws.
"""

from __future__ import annotations

import argparse

from millrace.contracts.plan import InstanceRole

from papers.flowkv.assignment import AssignmentTargets
from papers.flowkv.bench.assigning import AssignmentFigure, AssignmentLoad, add_options, shape
from papers.flowkv.mix import MixMember

GPUS = 8
#: KV blocks of 16 tokens per instance: 90 % of 141 GB a GPU, less 71 GB of weights, at 327,680 bytes a token.
BLOCKS = {1: 10_600, 2: 34_800, 4: 83_000, 8: 180_000}
TARGETS = AssignmentTargets(ttft_s=2.0, tpot_s=0.02)
LOADS = tuple(
    AssignmentLoad(name=name, lengths="azure-conversation", rate_per_s=rate, targets=targets)
    for name, rate, targets in (
        ("light, fast tokens", 2.0, TARGETS),
        ("busy, fast tokens", 8.0, TARGETS),
        ("busy, slower tokens", 20.0, AssignmentTargets(ttft_s=2.0, tpot_s=0.05)),
    )
)


def main() -> int:
    """Prints a table per load; fails where a request was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    arguments = parser.parse_args()
    sets = {f"tp{size}": f"h200-llama-3.1-70b-fp8-tp{size}" for size in BLOCKS}
    mixes = {
        f"{GPUS // size} of tp{size}": [
            MixMember(
                shape(f"tp{size}", "h200", sets[f"tp{size}"], devices=size, blocks=blocks),
                InstanceRole.BOTH,
                GPUS // size,
            )
        ]
        for size, blocks in BLOCKS.items()
    }
    figure = AssignmentFigure(sets, mixes, arguments.rows)
    print(f"{arguments.requests} requests a run, seeds 0 to {arguments.seeds - 1}, ± a 95 % t-interval over them")
    right = [figure.show(load, count=arguments.requests, seeds=arguments.seeds) for load in LOADS]
    return int(not all(right))
