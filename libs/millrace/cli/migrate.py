"""Moves a running request, with its KV, to another instance; its client goes on reading.

REQUEST is a request's id (its sequences move one by one), a sequence's, or the `x-request-id` that the client sent.
Where it runs is heard from the instances' snapshots. Each sequence gets a line: where from and to, how it ended, how
long no token was decoded. The exit code is 0 if every one has moved.
"""

from __future__ import annotations

import argparse

#: As MigrationMode has them; not imported, so that --help stays quick.
MODES = ("live", "stop_and_copy", "recompute")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    from millrace.cli.cluster import add_connection_options

    parser.add_argument(
        "request", metavar="REQUEST", help="id of a request, the client's own or ours, or of one of its sequences"
    )
    parser.add_argument("--to", default="", metavar="INSTANCE", help="default: the one with the most idle KV")
    parser.add_argument("--mode", choices=MODES, help="how the KV travels (default: as the migrator is configured)")
    parser.add_argument(
        "--within", type=float, default=2.0, metavar="S", help="one that cannot move yet may take so long to begin"
    )
    add_connection_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Finds it, asks, prints."""
    import asyncio

    from millrace.cli.migrating import migrate

    return asyncio.run(migrate(arguments))
