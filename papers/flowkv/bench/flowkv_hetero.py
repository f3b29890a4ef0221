"""Roles for two kinds of machines: the planner's choice against whole simulated clusters.

    python -m bench flowkv_hetero --rows FILE

Two A100 and two H200 with Llama-3-8B (published kernels), as FlowKV has L20 and H20 (section 4.3). Every assignment
that gives a kind one role, and all doing both, is rated by `papers/flowkv/assignment` on a sample, and run as a whole
cluster on other draws. A choice is right where no other serves more requests within the objectives.
"""

from __future__ import annotations

import argparse

from millrace.contracts.plan import InstanceRole

from papers.flowkv.assignment import AssignmentTargets
from papers.flowkv.bench.assigning import AssignmentFigure, AssignmentLoad, add_options, shape
from papers.flowkv.mix import InstanceShape, MixMember

SETS = {"a100": "a100-llama-3-8b", "h200": "h200-llama-3-8b"}
EACH = 2
LOADS = (
    AssignmentLoad(
        name="long prompts",
        lengths="mooncake-conversation",
        rate_per_s=2.5,
        targets=AssignmentTargets(ttft_s=3.0, tpot_s=0.025),
    ),
    AssignmentLoad(
        name="chat", lengths="azure-conversation", rate_per_s=28.0, targets=AssignmentTargets(ttft_s=1.0, tpot_s=0.02)
    ),
    AssignmentLoad(
        name="chat, relaxed",
        lengths="azure-conversation",
        rate_per_s=28.0,
        targets=AssignmentTargets(ttft_s=3.0, tpot_s=0.05),
    ),
)


def main() -> int:
    """Prints a table per load; fails where a request was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    arguments = parser.parse_args()
    a100 = shape("a100", "a100", SETS["a100"], blocks=25_000)
    h200 = shape("h200", "h200", SETS["h200"], blocks=50_000)
    figure = AssignmentFigure(SETS, mixes(a100, h200), arguments.rows)
    print(f"{arguments.requests} requests a run, seeds 0 to {arguments.seeds - 1}, ± a 95 % t-interval over them")
    right = [figure.show(load, count=arguments.requests, seeds=arguments.seeds) for load in LOADS]
    return int(not all(right))


def mixes(a100: InstanceShape, h200: InstanceShape) -> dict[str, list[MixMember]]:
    """Each kind with one role."""
    found = {}
    for first in InstanceRole:
        for second in InstanceRole:
            roles = {first, second}
            if roles not in ({InstanceRole.PREFILL}, {InstanceRole.DECODE}):
                found[f"A100 {first}, H200 {second}"] = [MixMember(a100, first, EACH), MixMember(h200, second, EACH)]
    return found
