"""Plans the thresholds and the instances of a cascade, and shows why.

FILE is a cluster's, with a ``[cascade]`` table. The front is printed: every design that no other one beats in
both quality and latency. Latencies are simulated with the step times of the models; scores and quality are those of the
recorded answers (``cascade.sample``, or --sample).
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    from millrace.cli.cluster import add_connection_options

    add = parser.add_argument
    add("--cascade", required=True, metavar="FILE", help="a cluster's file with a cascade")
    add("--rate", type=float, required=True, metavar="N", help="requests per second")
    target = parser.add_mutually_exclusive_group()
    target.add_argument(
        "--quality", type=float, metavar="N", help="mean quality to keep, 0 to 100 (default: the file's)"
    )
    target.add_argument("--latency", type=float, metavar="S", help="p95 to keep, seconds (default: the file's)")
    add("--sample", metavar="FILE", help="recorded answers of all tiers with the truth (default: the file's)")
    add("--apply", action="store_true", help="put the thresholds in force in a running cluster")
    add_connection_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Plans, prints; 3 where no plan keeps what is asked."""
    from millrace.cli.planning import plan_cascade

    return plan_cascade(arguments)
