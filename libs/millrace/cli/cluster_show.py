"""Prints a cluster's specification as TOML: of a file, checked, or, without a file, of the cluster that runs, as it is
now: counts of instances, roles, boundaries of stages and thresholds. A comment marks each line that differs from the
start.

    millrace cluster show > cluster.toml      # the running cluster as a file
    millrace cluster show cluster.toml        # checks the file

`millrace up --cluster FILE` starts a cluster from such a file; docs/OPERATIONS.md describes its fields.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path

from millrace.actor.errors import ConfigError
from millrace.cli.cluster import CLUSTER_FILE, add_connection_options, folder_of, no_cluster, resolve_connection
from millrace.cli.errors import CliError
from millrace.cli.listening import LISTEN_S, listen
from millrace.cli.running_spec import running_spec, with_differences
from millrace.cli.status_table import advice_lines
from millrace.cluster.model_folders import with_model_folders
from millrace.cluster.reading import read_cluster
from millrace.cluster.spec import ClusterSpec
from millrace.cluster.toml_text import cluster_toml


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``cluster show [FILE]``."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = actions.add_parser("show", help="print the specification as TOML")
    show.add_argument("file", nargs="?", metavar="FILE", help="a cluster's file; without one the running cluster's")
    add_connection_options(show)


def run(arguments: argparse.Namespace) -> int:
    """Reads, checks, prints."""
    file = Path(arguments.file) if arguments.file else _of_the_running(arguments)
    try:
        spec = with_model_folders(read_cluster(file))
    except ConfigError as error:
        raise CliError(str(error)) from None
    text = cluster_toml(spec)
    print(text if arguments.file else _as_it_runs(arguments, spec, text), end="")
    return 0


def _as_it_runs(arguments: argparse.Namespace, spec: ClusterSpec, start: str) -> str:
    """Listens until each service was heard once."""

    async def heard() -> list[str]:
        async with listen(resolve_connection(arguments)) as view:
            await asyncio.sleep(LISTEN_S)
            rows = view.instances(time.time_ns())
            adopted = [f"# {line}" for advice in view.advice() for line in advice_lines(advice)[1:]]
            running = running_spec(spec, rows, view.stages(rows), view.cascades())
            return [*adopted, *with_differences(start, cluster_toml(running))]

    return "\n".join(asyncio.run(heard())) + "\n"


def _of_the_running(arguments: argparse.Namespace) -> Path:
    folder = folder_of(arguments.dir)
    if folder is None or not (folder / CLUSTER_FILE).is_file():
        raise no_cluster("cluster show", arguments.dir, "or give a FILE")
    return folder / "run" / "cluster.toml"
