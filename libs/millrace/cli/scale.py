"""Starts or stops instances of a model, until so many serve.

COUNT is a number, or a change such as +1 or -1. With --shape only instances of that device kind and tensor parallel
size count (`cpu`, `h100x2`), with --role only those of that role; instances that are started then have both. Without
them all instances of the model count.

The model's coordinator asks the supervisor, or the provisioner beside docker compose, for instances that were set aside
for it: `millrace up --instances 2 --instances-max 4`, or `spares` of a group in a cluster's file. Those that end are
chosen by what has to leave them, the least first. They take no new requests, what runs moves away with its KV, the
longest predicted rest first, and what is left after the limit that is printed goes on elsewhere by recomputing.

It is refused, with the reason, where a stage could not prefill or not decode, for a shape that nobody has, where no
device is left, where the plan has changed since, while instances are being started or stopped, and within 30 s of a
change of roles. A provisioning strategy (`--provision`) goes on from the new number by its own rules.
"""

from __future__ import annotations

import argparse

#: As InstanceRole has them; not imported, so that --help stays quick.
ROLES = ("prefill", "decode", "both")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    from millrace.cli.cluster import add_connection_options

    parser.add_argument("model", metavar="MODEL", help="its served name")
    parser.add_argument("count", metavar="COUNT", help="instances that shall serve: 3, +1 or -1")
    parser.add_argument("--shape", default="", help="device kind and tensor parallel size: cpu, h100x2 (default: all)")
    parser.add_argument("--role", choices=ROLES, help="(default: all)")
    parser.add_argument(
        "--limit", type=float, default=180.0, metavar="S", help="how long to wait for instances (default: 180)"
    )
    parser.add_argument("--detach", action="store_true", help="return once the order is taken")
    add_connection_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Asks, follows, prints."""
    import asyncio

    from millrace.cli.scaling import scale

    return asyncio.run(scale(arguments))
