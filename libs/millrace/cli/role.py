"""Gives an instance another role: prefill, decode or both.

The coordinator of the instance's model carries it out through `both`: the instance takes new requests and keeps what it
has until nothing moves from or to it, and then has its new role; what runs goes on without a pause. The order waits
where another flip is under way, where the instance or another one of its stage was flipped within the last 10 s, and
where instances were started or stopped within the last 30 s; with --now it is refused for that, and for open moves.
It is always refused for an unknown instance, where a stage could not prefill or not decode, and where the plan has
changed since the command began to look.

The role holds until it is ordered anew, over restarts of instances and of the coordinator. A policy on roles (`flips`
of the coordinator) may still change it under load.
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
    parser.add_argument("--now", action="store_true", help="be refused rather than wait for what holds the flip back")
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
