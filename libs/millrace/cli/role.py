"""Gives an instance another role: prefill, decode or both.

The coordinator of the instance's model changes the role in two steps. First the instance has the role `both`: it takes
new requests and keeps its own until no migration from it is open. Then it gets its new role. Running requests
continue without a pause. The order waits while another flip is under way, and for 10 s after a flip of the instance or
of another one of its stage; with --now it is refused instead, and also while migrations are open. It is always refused
for an unknown instance, if a stage would have no instance for prefill or for decode, and if the plan has changed since
the command read it.

The role stays until the next order, across restarts of instances and of the coordinator. A role policy (`flips` of the
coordinator) may still change it under load.
"""

from __future__ import annotations

import argparse

#: As InstanceRole has them; not imported, so that --help stays quick.
ROLES = ("prefill", "decode", "both")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    from millrace.cli.cluster import add_connection_options

    parser.add_argument("instance", metavar="INSTANCE", help="see `millrace status`")
    parser.add_argument("role", choices=ROLES)
    parser.add_argument("--now", action="store_true", help="refuse the order instead of waiting")
    parser.add_argument(
        "--limit", type=float, default=60.0, metavar="S", help="how long to follow the flip (default: 60)"
    )
    parser.add_argument("--detach", action="store_true", help="return once the order is taken")
    add_connection_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Asks, follows, prints."""
    import asyncio

    from millrace.cli.flipping import flip

    return asyncio.run(flip(arguments))
