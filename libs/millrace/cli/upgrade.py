"""Replaces every process of a running cluster by this environment's; no stream is cut.

    /srv/millrace-0.2/bin/millrace upgrade --dir /var/lib/millrace

Run it with the `millrace` of the new environment. Its supervisor goes on with the processes that run; then NATS
servers, services and engines are replaced as by `millrace apply`. If one of them does not start, crashes, or takes far
longer for a token, the former environment takes everything back in the same way. If the command is interrupted, run it
again, from either environment.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import psutil

from millrace.cli.cluster import folder_of, no_cluster
from millrace.cli.down import add_folder_option, running_supervisor
from millrace.cli.errors import CliError
from millrace.contracts.channels import Role
from millrace.supervision.survivors import survivors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    add_folder_option(parser)
    parser.add_argument(
        "--within", default="30", metavar="S", help="how long one instance may drain (default: %(default)s)"
    )
    parser.add_argument("--reason", default="an upgrade", metavar="TEXT", help="for the log of orders")


def run(arguments: argparse.Namespace) -> int:
    """Takes over and replaces; goes back where that fails."""
    folder = folder_of(arguments.dir)
    supervisor = running_supervisor(folder) if folder else None
    if folder is None or supervisor is None:
        raise no_cluster("upgrade", arguments.dir)
    program = " ".join(supervisor.cmdline()).partition(" -m ")[0]
    unit = kept_by(supervisor)
    if (takes := program != sys.executable) and unit:
        raise CliError(
            f"systemd keeps {unit} up: write it anew by this environment's `millrace service install`, then "
            f"`systemctl daemon-reload`, `systemctl kill --kill-whom=main --signal=KILL {unit}`, and this again"
        )
    former = program if takes else former_program(folder)
    words = ["--within", arguments.within, "--reason", arguments.reason]
    if replaced(sys.executable, folder, words, takes=takes):
        return 0
    if unit and former:
        raise CliError(f"not all is replaced; to go back, write {unit} anew by {former} and `upgrade` there")
    if not Path(former).is_file():  # there is none, or it was removed
        raise CliError("not all is replaced; run it again to go on")
    print(f"everything goes back to {former}", flush=True)
    if not replaced(former, folder, [*words, "--force"], takes=True):  # what ran before is not tried
        raise CliError("nor can it be had back; `millrace status` shows what runs")
    raise CliError(f"the cluster is as it was before, of {former}")


def former_program(folder: Path) -> str:
    """Python of the environment that an interrupted upgrade came from; empty where no service runs by it any more."""
    services = (each.spec for each in survivors(folder) if each.spec["role"] not in ("nats", Role.WORKER))
    return next((spec["command"][0] for spec in services if spec["command"][0] != sys.executable), "")


def kept_by(supervisor: psutil.Process) -> str:
    """Name of the systemd unit that starts this supervisor again; empty where there is none."""
    groups = Path(f"/proc/{supervisor.pid}/cgroup").read_text().splitlines()
    for unit in {name for line in groups if (name := line.rpartition("/")[2]).endswith(".service")}:
        for manager in ("--system", "--user"):
            asked = ["systemctl", manager, "show", "--property=MainPID", "--value", unit]
            try:
                said = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
            except FileNotFoundError:
                return ""
            if said.strip() == str(supervisor.pid):
                return unit
    return ""


def replaced(python: str, folder: Path, words: list[str], *, takes: bool) -> bool:
    """Replaces every process by that environment's; returns whether it worked.

    Args:
        python: The environment's interpreter.
        takes: Whether its supervisor has to take over first.
    """
    millrace, where = [python, "-m", "millrace.cli"], ["--dir", str(folder)]
    if takes:
        print(f"the supervisor of {python} takes over", flush=True)
        command = [*millrace, "up", "--take-over", "--detach", *where]
        up = subprocess.run(command, capture_output=True, text=True, check=False)
        if up.returncode:
            print(up.stderr, end="")
            return False
    return subprocess.run([*millrace, "apply", *words, *where], check=False).returncode == 0
