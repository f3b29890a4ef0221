"""Takes an instance out of service: no new requests; running ones move to other instances with their KV.

The supervisor of the instance's process (`millrace up`, or the provisioner beside docker compose) drains it: running
requests move, those left at the limit are handed back to ingress (how many, and why they did not move, is printed),
the process ends, and it is not restarted. --back starts it again. If no supervisor manages the instance, the worker
itself is asked to drain and end; whatever started it may restart it.

The last ready instance of a model is drained only with --force: its requests cannot continue anywhere and fail. A
drained instance stays in `millrace status`, and provisioning does not start it again.

With --keep its requests move away, but the instance stays in service and gets new requests.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    from millrace.cli.cluster import add_connection_options

    parser.add_argument("instance", metavar="INSTANCE", help="see `millrace status`")
    parser.add_argument(
        "--within", type=float, default=10.0, metavar="S", help="how long moving and decoding may take (default: 10)"
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--keep", action="store_true", help="only move what runs there; it stays in service")
    group.add_argument("--back", action="store_true", help="start an instance that was drained")
    parser.add_argument("--force", action="store_true", help="also the last instance of its model")
    parser.add_argument("--host", default="local", help="host of its supervisor (default: local, as `millrace up`)")
    add_connection_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Asks, waits, prints."""
    import asyncio

    from millrace.cli.draining import drain

    return asyncio.run(drain(arguments))
