"""Shows the cluster live, twice a second. q or Ctrl-C ends it."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

from rich.console import Console
from rich.live import Live

from millrace.cli.cluster import add_connection_options, resolve_connection
from millrace.cli.errors import CliError
from millrace.cli.keyboard import key_pressed
from millrace.cli.listening import listen
from millrace.cli.status_table import cluster_tables

#: Time between two pictures.
REFRESH_S = 0.5

#: Lines of the screen that are not instances: headline, two table heads, and room for the services.
LINES_KEPT = 12

#: Migrations shown at once, and the lines that their table needs besides.
MIGRATIONS_MAX, MIGRATION_LINES = 6, 3

#: Lines that the table of stages needs besides one for each.
STAGE_LINES = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    add_connection_options(parser)


async def run(arguments: argparse.Namespace) -> int:
    """Draws until told to stop."""
    if not sys.stdout.isatty():
        raise CliError("standard output is no terminal; `millrace status --json` is for programs")
    connection = resolve_connection(arguments)
    console = Console(highlight=False)
    async with listen(connection) as view:
        with key_pressed("q") as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
            while not pressed.is_set():
                now_ns = time.time_ns()
                migrations = min(MIGRATIONS_MAX, len(view.migrations(now_ns)))
                lines = LINES_KEPT + (migrations + MIGRATION_LINES if migrations else 0)
                stages = len(view.stages(view.instances(now_ns)))
                lines += stages + STAGE_LINES if stages else 0
                tables = cluster_tables(
                    connection.cluster,
                    view,
                    now_ns,
                    rows_max=max(1, console.height - lines),
                    migrations_max=MIGRATIONS_MAX,
                    width=console.width,
                )
                live.update(tables, refresh=True)
                try:
                    await asyncio.wait_for(pressed.wait(), REFRESH_S)
                except TimeoutError:
                    pass
    return 0
