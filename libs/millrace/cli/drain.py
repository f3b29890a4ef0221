"""Takes an instance out of service before maintenance: no new work, what runs moves to other instances with its KV.

Whoever keeps the instance's process (`millrace up`, or the provisioner beside docker compose) is asked to let it go: it
drains, moving what can move and handing back the rest at the limit, ends, and is not started again. Bring it back with
--back. Where nobody keeps it, the worker itself is asked to drain and end; what started it may start it again.

The last instance of a model that is ready is drained with --force only: its requests have nowhere to go and fail. A
drained instance stays in `millrace status`, and provisioning does not start it again.

With --keep nothing but the move happens: the instance stays in service and gets new requests.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    from millrace.cli.cluster import add_connection_options

    parser.add_argument("instance", metavar="INSTANCE", help="see `millrace status`")
    parser.add_argument(
        "--limit", type=float, default=10.0, metavar="S", help="how long moving and decoding may take (default: 10)"
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--keep", action="store_true", help="only move what runs there; it stays in service")
    group.add_argument("--back", action="store_true", help="start an instance that was drained")
    parser.add_argument("--force", action="store_true", help="also the last instance of its model")
    parser.add_argument("--host", default="local", help="of whoever keeps it (default: local, as `millrace up`)")
    add_connection_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Asks, waits, prints."""
    import asyncio

    from millrace.cli.draining import drain

    return asyncio.run(drain(arguments))
