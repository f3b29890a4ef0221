"""Selection of the cluster that a verb talks to: options, else the file that a running cluster's supervisor writes.

The file is ``.millrace/run/cluster.json``, found from the working directory upwards, or under ``MILLRACE_DIR``.
"""

from __future__ import annotations

import argparse
import os
from contextlib import suppress
from pathlib import Path

import msgspec

from millrace.cli.errors import CliError
from millrace.supervision.cluster_folder import command, find_folder

CLUSTER_FILE = Path("run") / "cluster.json"

#: What `millrace up` runs: ``python -m MODULE --options JSON``.
SUPERVISOR_MODULE = "deployment.local_supervisor"


class ClusterFile(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a cluster, written by its supervisor, which may add further fields for its own use.

    Attributes:
        nats_url: For example ``nats://127.0.0.1:4222``.
        nats_tls: Folder that ``millrace certs`` made; empty where NATS speaks no TLS.
        observer_user: NATS user that may read everything and write nothing.
        operator_user: NATS user that may read everything, and ask for migrations and drains.
        ingress_url: Base of the OpenAI API.
        host: Name under which this machine's supervisor takes orders.
        clock_offset_ns: Of its processes' clock (``millrace.actor.clock``); 0 where an older version has begun it.
    """

    cluster: str = "local"
    nats_url: str = "nats://127.0.0.1:4222"
    nats_tls: str = ""
    observer_user: str = ""
    observer_password: str = ""
    operator_user: str = ""
    operator_password: str = ""
    ingress_url: str = ""
    host: str = "local"
    clock_offset_ns: int = 0


class _Options(msgspec.Struct):
    directory: str


class ConnectionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Cluster, bus address and credentials to connect with.

    Attributes:
        tls: Folder that ``millrace certs`` made; empty for no TLS.
        host: Name under which this machine's supervisor takes orders.
        origin: Where this comes from, for messages to a person.
    """

    cluster: str
    url: str
    user: str
    password: str
    tls: str = ""
    host: str = "local"
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
    group.add_argument("--tls", metavar="DIR", help="what `millrace certs` made, where NATS asks for a certificate")


def resolve_connection(arguments: argparse.Namespace, *, operator: bool = False) -> ConnectionSettings:
    """Options over the cluster file over the defaults.

    Args:
        arguments: What ``add_connection_options`` added.
        operator: As the one who may ask for something, not only look on.

    Raises:
        CliError: there is neither an option --nats nor a cluster file, or the file is damaged.
    """
    folder = folder_of(arguments.dir)
    file = folder / CLUSTER_FILE if folder else None
    known = read_cluster_file(file) if file and file.is_file() else None
    if known is None and not arguments.nats:
        raise no_cluster("status", arguments.dir, "or give --nats URL")
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
        tls=arguments.tls or (known.nats_tls if own else ""),
        host=known.host,
        origin="--nats" if arguments.nats else str(file),
    )


def folder_of(given: str | None) -> Path | None:
    """The folder of a cluster's files: as given by --dir, else the one that is found from here upwards."""
    return Path(given) if given else find_folder(Path.cwd(), os.environ)


def no_cluster(verb: str, directory: str | None, *further: str) -> CliError:
    """The error of a verb that finds no cluster: how to start one, and the commands for clusters that run elsewhere.

    Args:
        verb: What to type for one of those.
        directory: As given by --dir; none for the folder of this place.
    """
    up = f"./task up --dir {directory}" if directory else "./task up"
    start = f"no cluster runs in {directory or 'this folder or a parent'}; start one with `{up}`"
    lines = [", ".join([start, *further])]
    if others := running_folders():
        lines += ["running elsewhere on this machine:", *(f"  {command(verb, folder)}" for folder in others)]
    return CliError("\n".join(lines))


def running_folders() -> list[Path]:
    """Folders of the clusters that run on this machine, as far as this user may see them."""
    import psutil  # a tenth of a second, which only an error costs

    found = set()
    for process in psutil.process_iter(["cmdline"]):
        head, _, options = " ".join(process.info["cmdline"] or []).partition(" --options ")
        if head.endswith(SUPERVISOR_MODULE):
            with suppress(msgspec.DecodeError):
                found.add(msgspec.json.decode(options, type=_Options).directory)
    return sorted(map(Path, found))


def read_cluster_file(file: Path) -> ClusterFile:
    """Reads a cluster file.

    Raises:
        CliError: it is not readable or no cluster file.
    """
    try:
        return msgspec.json.decode(file.read_bytes(), type=ClusterFile)
    except (OSError, msgspec.DecodeError) as error:
        raise CliError(f"{file} cannot be read: {error}") from None
