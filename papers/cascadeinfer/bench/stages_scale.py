"""Messages per move and processor time of stages with trading, by number of instances.

    python -m bench stages_scale --rows FILE

The same load per instance at each size, ShareGPT lengths, fixed stages in the ratio 5 to 3 cut at 600 tokens. Messages
of a move are asks and answers (two for each candidate asked), and offer, answer, start and end of each deal that was
offered; grants of queued deals are left out. A broker process has 64 instances, as live clusters start them. Aims: at
most 20 per move, at most twice the time without stages.
"""

from __future__ import annotations

import argparse
import sys
from statistics import mean

from millrace.policies.stages.membership import StageShape
from millrace.supervision.service_fields import BROKER_INSTANCES_MAX

from bench.scenarios.tables import table
from papers.cascadeinfer.bench.stages.runs import StageRow, add_options, options, run_all
from papers.cascadeinfer.bench.stages.setups import Setup
from papers.cascadeinfer.bench.stages.variants import full

#: Of a deal that was offered: OfferDeal, DealQueued or DealRefused, DealStarted, DealEnded.
PER_DEAL = 4

#: Deals that end so were never offered.
NOT_OFFERED = ("no_bids", "stays", "ended", "new_plan", "bus_away")


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
            changes={"migration": {"instances_each": BROKER_INSTANCES_MAX}},
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
    """Trade messages over moves; nan without moves."""
    answers = sum(count for what, count in row.trades.items() if what.startswith("answer "))
    deals = [(what.split(), count) for what, count in row.trades.items() if what.startswith("deal ")]
    offered = sum(count for words, count in deals if words[2] not in NOT_OFFERED)
    moved = sum(count for words, count in deals if words[2] == "moved")
    return (2 * answers + PER_DEAL * offered) / moved if moved else float("nan")


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
