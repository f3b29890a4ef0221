"""Starts or stops instances of a model, until COUNT serve.

COUNT is a number, or a change such as +1 or -1. With --shape, only instances of that device kind and tensor parallel
size count (`cpu`, `h100x2`); with --role, only those of that role. Instances that are started get both. By default all
instances of the model count.

The model's coordinator asks the supervisor, or the provisioner beside docker compose, to start spare instances: those
of `millrace up --instances 2 --instances-max 4`, or `spares` of a group in a cluster's file. It stops those with the
least KV to move. They take no new requests; their running requests move away with their KV, those with the longest
predicted remainder first. Requests that are left at the printed time limit continue elsewhere by recompute.

The order is refused, with the reason, if a stage would have no instance for prefill or for decode, if no provisioner
has the shape or a free device, if the plan has changed since the command read it, while instances are being started or
stopped, and for 30 s after a change of roles. A provisioning policy (`--provision`) continues from the new number by
its own rules.
"""

from __future__ import annotations

import argparse

#: As InstanceRole has them; not imported, so that --help stays quick.
ROLES = ("prefill", "decode", "both")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    from millrace.cli.cluster import add_connection_options

    parser.add_argument("model", metavar="MODEL", help="its served name")
    parser.add_argument("count", metavar="COUNT", help="instances to run: 3, +1 or -1")
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
