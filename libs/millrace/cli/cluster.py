"""Selection of the cluster that a verb talks to: options, else the file that a running cluster's supervisor writes.

The file is ``.millrace/run/cluster.json``, found from the working directory upwards, or under ``MILLRACE_DIR``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from millrace.cli.errors import CliError

FOLDER = ".millrace"
CLUSTER_FILE = Path("run") / "cluster.json"


class ClusterFile(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a cluster, written by its supervisor, which may add further fields for its own use.

    Attributes:
        nats_url: For example ``nats://127.0.0.1:4222``.
        observer_user: NATS user that may read everything and write nothing.
        operator_user: NATS user that may read everything, and ask for migrations and drains.
        ingress_url: Base of the OpenAI API.
    """

    cluster: str = "local"
    nats_url: str = "nats://127.0.0.1:4222"
    observer_user: str = ""
    observer_password: str = ""
    operator_user: str = ""
    operator_password: str = ""
    ingress_url: str = ""


class ConnectionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Cluster, bus address and credentials to connect with.

    Attributes:
        origin: Where this comes from, for messages to a person.
    """

    cluster: str
    url: str
    user: str
    password: str
    origin: str


def add_connection_options(parser: argparse.ArgumentParser) -> None:
    """The options that every verb with a bus shares."""
    group = parser.add_argument_group(
        "cluster", "by default the one whose .millrace folder is in this folder or a parent"
    )
    group.add_argument("--dir", metavar="DIR", help="folder of the cluster's files, as `millrace up --dir` was given")
    group.add_argument("--cluster", metavar="NAME", help="cluster name, second token of every subject")
    group.add_argument("--nats", metavar="URL", help="for example nats://127.0.0.1:4222")
    group.add_argument("--user", help="NATS user")
    group.add_argument("--password", help="its password")


def resolve_connection(arguments: argparse.Namespace, *, operator: bool = False) -> ConnectionSettings:
    """Options over the cluster file over the defaults.

    Args:
        arguments: What ``add_connection_options`` added.
        operator: As the one who may ask for something, not only look on.

    Raises:
        CliError: there is neither an option --nats nor a cluster file, or the file is damaged.
    """
    folder = Path(arguments.dir) if arguments.dir else find_folder(Path.cwd(), os.environ)
    file = folder / CLUSTER_FILE if folder else None
    known = read_cluster_file(file) if file and file.is_file() else None
    if known is None and arguments.dir and not arguments.nats:
        raise CliError(f"no cluster runs in {arguments.dir}; start one with `./task up --dir {arguments.dir}`")
    if known is None and not arguments.nats:
        raise CliError("no cluster runs in this folder or a parent; start one with `./task up`, or give --nats URL")
    known = known or ClusterFile()
    # Somebody else's server gets this cluster's password only if it is asked for by name.
    own = arguments.nats in (None, known.nats_url)
    user, password = (
        (known.operator_user, known.operator_password) if operator else (known.observer_user, known.observer_password)
    )
    return ConnectionSettings(
        cluster=arguments.cluster or known.cluster,
        url=arguments.nats or known.nats_url,
        user=arguments.user or (user if own else ""),
        password=arguments.password or (password if own else ""),
        origin="--nats" if arguments.nats else str(file),
    )


def find_folder(start: Path, environment: Mapping[str, str]) -> Path | None:
    """The ``.millrace`` folder: ``MILLRACE_DIR`` where it is set, else the first one from ``start`` upwards."""
    if given := environment.get("MILLRACE_DIR"):
        return Path(given)
    candidates = (place / FOLDER for place in (start, *start.parents))
    return next((folder for folder in candidates if folder.is_dir()), None)


def read_cluster_file(file: Path) -> ClusterFile:
    """Reads a cluster file.

    Raises:
        CliError: it is not readable or no cluster file.
    """
    try:
        return msgspec.json.decode(file.read_bytes(), type=ClusterFile)
    except (OSError, msgspec.DecodeError) as error:
        raise CliError(f"{file} cannot be read: {error}") from None
