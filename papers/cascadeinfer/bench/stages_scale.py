"""Messages per move and processor time of stages with trading, by number of instances.

    python -m bench stages_scale --rows FILE

The same load per instance at each size, ShareGPT lengths, fixed stages in the ratio 5 to 3 cut at 600 tokens. Messages
of a move are asks and bids, two for each candidate asked. A broker process has 64 instances, as live clusters with
modelled engines start them. Aims: at most 20 per move, at most twice the time without stages.
"""

from __future__ import annotations

import argparse
import sys
from statistics import mean

from millrace.cluster.workers import MODELLED_PER_PROCESS
from millrace.policies.stages.membership import StageShape

from bench.scenarios.tables import table
from papers.cascadeinfer.bench.stages.runs import StageRow, add_options, options, run_all
from papers.cascadeinfer.bench.stages.setups import Setup
from papers.cascadeinfer.bench.stages.variants import full


def main() -> int:
    """Prints a line per size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, seeds=1)
    parser.add_argument("--instances", nargs="+", type=int, default=[16, 64, 256])
    parser.add_argument("--requests-each", type=int, default=150, help="per instance (default %(default)s)")
    arguments = parser.parse_args()
    chosen, lines = options(arguments), []
    for instances in arguments.instances:
        setup = Setup(
            trace="ShareGPT",
            instances=instances,
            load=0.6,
            requests=arguments.requests_each * instances,
            kappa=0.2,
            changes={"migration": {"instances_each": MODELLED_PER_PROCESS}},
        )
        lower = instances * 5 // 8
        shapes = (
            StageShape(length_min=0, length_max=600, instances=lower),
            StageShape(length_min=600, length_max=None, instances=instances - lower),
        )
        specs = {"none": setup.spec({}), "stages": setup.spec(full(shapes, refinement={}))}
        rows = run_all(chosen.jobs(specs), chosen)
        lines += _lines(instances, rows)
    print(table(["instances", "moves", "messages/move", "CPU s without", "CPU s with", "ratio"], lines))
    return 0


def messages_per_move(row: StageRow) -> float:
    """Asks and bids over moves; nan without moves."""
    answers = sum(count for what, count in row.trades.items() if what.startswith("answer "))
    ended = [(what.split(), count) for what, count in row.trades.items() if what.startswith("ended ")]
    moved = sum(count for words, count in ended if words[2] == "moved")
    return 2 * answers / moved if moved else float("nan")


def _lines(instances: int, rows: list[StageRow]) -> list[list[str]]:
    plain = [row for row in rows if row.label == "none"]
    staged = [row for row in rows if row.label == "stages"]
    if not plain or not staged:
        return []
    without, with_ = mean(row.cpu_s for row in plain), mean(row.cpu_s for row in staged)
    moves, messages = mean(row.moved for row in staged), mean(messages_per_move(row) for row in staged)
    return [
        [str(instances), f"{moves:.0f}", f"{messages:.1f}", f"{without:.0f}", f"{with_:.0f}", f"{with_ / without:.1f}"]
    ]


if __name__ == "__main__":
    sys.exit(main())
