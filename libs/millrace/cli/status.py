"""Shows the cluster once: instances with their load, migrations under way, services, totals.

It listens for a little more than a second, because every service publishes its presence once a second.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

import msgspec
from rich.console import Console

from millrace.cli.cascade_table import cascade_rows
from millrace.cli.cluster import add_connection_options, resolve_connection
from millrace.cli.listening import LISTEN_S, listen
from millrace.cli.status_table import PIPE_COLUMNS, cluster_tables


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument(
        "--json", action="store_true", help="for programs; rates in tokens per second, times in seconds"
    )
    add_connection_options(parser)


async def run(arguments: argparse.Namespace) -> int:
    """Listens, prints."""
    connection = resolve_connection(arguments)
    async with listen(connection) as view:
        await asyncio.sleep(LISTEN_S)
        now_ns = time.time_ns()
    if arguments.json:
        instances = view.instances(now_ns)
        report = {
            "cluster": connection.cluster,
            "stages": view.stages(instances),
            "instances": instances,
            "services": view.services(now_ns),
            "cascades": cascade_rows(view.cascades()),
            "migrations": view.migrations(now_ns),
            "orders": [{"instance": n, "role": role, "ordered": wanted} for n, role, wanted in view.orders()],
            "advice": view.advice(),
            "totals": view.totals(instances),
        }
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
        return 0
    # A pipe has no width; 120 columns hold every table.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS)
    console.print(cluster_tables(connection.cluster, view, now_ns, width=console.width))
    return 0
