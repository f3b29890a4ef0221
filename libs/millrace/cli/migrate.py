"""Moves a running request, with its KV, to another instance; its stream continues.

REQUEST is a request's id (its sequences move one by one), a sequence's id, or the `x-request-id` that the client sent.
The command finds its instance in the instances' snapshots. It prints one line per sequence: source, target, outcome,
and the time without a token. The exit code is 0 if every sequence has moved.
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
    parser.add_argument("--mode", choices=MODES, help="how the KV is moved (default: as the migrator is configured)")
    parser.add_argument(
        "--within", type=float, default=2.0, metavar="S", help="wait this long for a sequence that cannot move yet"
    )
    add_connection_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Finds it, asks, prints."""
    import asyncio

    from millrace.cli.migrating import migrate

    return asyncio.run(migrate(arguments))
