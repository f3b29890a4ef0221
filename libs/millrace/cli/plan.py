"""Plans the thresholds and the instances of a cascade, or the roles of instances, and shows why.

FILE is a cluster's, with a ``[cascade]`` table. The front is printed: every design that no other one beats in
both quality and latency. Latencies are simulated with the step times of the models; scores and quality are those of the
recorded answers (``cascade.sample``, or --sample).

With --roles, every assignment of roles (and, where a kind of device has groups of several tensor parallel sizes, of
shapes) to the devices of a model's groups is simulated under --rate and --lengths; the one that keeps the objectives
for most requests is printed as groups of the file.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    from millrace.cli.cluster import add_connection_options

    add = parser.add_argument
    planned = parser.add_mutually_exclusive_group(required=True)
    planned.add_argument("--cascade", metavar="FILE", help="a cluster's file with a cascade")
    planned.add_argument("--roles", metavar="FILE", help="a cluster's file: which instances prefill, which decode")
    add("--rate", type=float, required=True, metavar="N", help="requests per second")
    target = parser.add_mutually_exclusive_group()
    target.add_argument(
        "--quality", type=float, metavar="N", help="mean quality to keep, 0 to 100 (default: the file's)"
    )
    target.add_argument("--latency", type=float, metavar="S", help="p95 to keep, seconds (default: the file's)")
    add("--sample", metavar="FILE", help="recorded answers of all tiers with the truth (default: the file's)")
    add(
        "--apply",
        action="store_true",
        help="put the thresholds in force in a running cluster",
    )
    add("--model", default="", help="with --roles: the model, where the file has several")
    add("--lengths", default="azure-conversation", help="with --roles: a set that ships (default: %(default)s)")
    add("--ttft", type=float, default=2.0, metavar="S", help="with --roles: objective, seconds (default: %(default)s)")
    add("--tpot", type=float, default=0.05, metavar="S", help="with --roles: objective, seconds (default: %(default)s)")
    add("--bandwidth", type=float, default=100.0, metavar="GBPS", help="with --roles: of a hand-off (default: 100)")
    add("--seed", type=int, default=0, help="with --roles: of the sample (default: 0)")
    add_connection_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Plans, prints; 3 where no plan keeps what is asked."""
    if arguments.roles:
        from millrace.cli.role_planning import plan_roles

        return plan_roles(arguments)
    from millrace.cli.planning import plan_cascade

    return plan_cascade(arguments)
