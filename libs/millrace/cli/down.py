"""Stops the cluster that `millrace up` started in this folder or a parent, and waits until it is gone."""

from __future__ import annotations

import argparse
import contextlib
import signal
import time
from pathlib import Path

import msgspec
import psutil

from millrace.cli.cluster import CLUSTER_FILE, folder_of, no_cluster
from millrace.cli.errors import CliError
from millrace.supervision.survivors import WrittenProcess, created, survivors

#: The supervisor gives its children at most about 40 s in all; this leaves it time to end itself.
WAIT_S = 60.0


class _Supervisor(msgspec.Struct):
    supervisor_pid: int
    supervisor_created: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this verb's options."""
    add_folder_option(parser)


def add_folder_option(parser: argparse.ArgumentParser) -> None:
    """The option that a verb of this machine's cluster has."""
    parser.add_argument(
        "--dir", metavar="DIR", help="the cluster's folder; by default .millrace in this folder or a parent"
    )


def run(arguments: argparse.Namespace) -> int:
    """Asks the supervisor to stop."""
    folder = folder_of(arguments.dir)
    process = running_supervisor(folder) if folder else None
    if process is None and folder is not None and (left := survivors(folder)):
        _end(left)
        print("the cluster is down; its supervisor had been killed")
        return 0
    if process is None:
        raise no_cluster("down", arguments.dir)
    process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + WAIT_S
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            raise CliError(
                f"the supervisor (pid {process.pid}) is still stopping after {WAIT_S:.0f} s; see {folder}/logs"
            )
        time.sleep(0.05)
    print("the cluster is down")
    return 0


def _end(left: list[WrittenProcess]) -> None:
    """Ends what outlived its supervisor."""
    processes = [psutil.Process(each.pid) for each in left]
    for number, limit_s in ((signal.SIGTERM, WAIT_S / 2), (signal.SIGKILL, WAIT_S / 2)):
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        _, processes = psutil.wait_procs(processes, limit_s)


def running_supervisor(folder: Path) -> psutil.Process | None:
    """The supervisor named in a cluster file, if that very process still runs."""
    try:
        known = msgspec.json.decode((folder / CLUSTER_FILE).read_bytes(), type=_Supervisor)
        process = psutil.Process(known.supervisor_pid)
        # The pid may have been given to another process since. Versions before this one wrote no creation.
        ours = known.supervisor_created in ("", created(process.pid)) and "supervisor" in " ".join(process.cmdline())
    except (OSError, msgspec.DecodeError, psutil.Error):
        return None
    return process if ours else None
