"""Prints a cluster's specification as TOML: of a file, checked and with its defaults filled in, or, without a file, of
the running cluster.

    millrace cluster show > cluster.toml      # the running cluster as a file
    millrace cluster show cluster.toml        # checks the file

`millrace up --cluster FILE` starts a cluster from such a file; docs/OPERATIONS.md describes its fields.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from millrace.actor.errors import ConfigError
from millrace.cli.cluster import no_cluster
from millrace.cli.errors import CliError
from millrace.supervision.cluster_folder import find_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``cluster show [FILE]``."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = actions.add_parser("show", help="print the specification as TOML")
    show.add_argument("file", nargs="?", metavar="FILE", help="a cluster's file; without one the running cluster's")
    show.add_argument(
        "--dir", metavar="DIR", help="the cluster's folder; by default .millrace in this folder or a parent"
    )


def run(arguments: argparse.Namespace) -> int:
    """Reads, checks, prints."""
    from millrace.cluster import cluster_toml, read_cluster
    from millrace.cluster.model_folders import with_model_folders

    file = Path(arguments.file) if arguments.file else _of_the_running(arguments)
    try:
        print(cluster_toml(with_model_folders(read_cluster(file))), end="")
    except ConfigError as error:
        raise CliError(str(error)) from None
    return 0


def _of_the_running(arguments: argparse.Namespace) -> Path:
    folder = Path(arguments.dir) if arguments.dir else find_folder(Path.cwd(), os.environ)
    if folder is None or not (folder / "run" / "cluster.json").is_file():
        raise no_cluster("cluster show", arguments.dir, "or give a FILE")
    return folder / "run" / "cluster.toml"
