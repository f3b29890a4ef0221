"""Writes a unit with which systemd keeps a cluster up: ``millrace service [--name NAME] install|show [options of up]``.

The supervisor is the unit's process. Where it is killed, systemd starts it again and it takes over what lives: no
stream ends (``KillMode=process``). Told to end, it ends its cluster in order: an ``ExecStop`` would fail after
`millrace down`, and systemd would start the cluster again. Nothing is started here; what to type next is printed.
"""

from __future__ import annotations

import argparse
import os
import pwd
import sys
from pathlib import Path

from millrace.cli import up
from millrace.cli.arguments import VerbParser
from millrace.cli.cluster_flags import cluster_of
from millrace.cli.errors import CliError

UNIT = """\
[Unit]
Description=Millrace cluster in {directory}
After=network-online.target
Wants=network-online.target
StartLimitIntervalSec=0

[Service]
Type=notify
TimeoutStartSec=infinity
{user}WorkingDirectory={folder}
ExecStart={start}
KillMode=process
Restart=on-failure
RestartPreventExitStatus=0 SIGTERM
TimeoutStopSec=90
OOMPolicy=continue
LimitNOFILE=65536

[Install]
WantedBy={target}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this verb's options; those of ``up`` follow them."""
    parser.add_argument("action", choices=["install", "show"], help="write the unit, or print it")
    parser.add_argument("--name", default="millrace", help="the unit is NAME.service (default: millrace)")
    parser.add_argument("--unit-dir", type=Path, help="where it is written; by default systemd's, root's or the user's")
    parser.add_argument("up", nargs=argparse.REMAINDER, metavar="...", help="options of `millrace up`")


def run(arguments: argparse.Namespace) -> int:
    """Writes or prints the unit."""
    parser = VerbParser(prog="millrace service install")
    up.add_arguments(parser)
    chosen = parser.parse_args(arguments.up)
    if chosen.detach:
        raise CliError("a unit's cluster runs in the foreground: leave out --detach")
    cluster_of(chosen, len(os.sched_getaffinity(0)))  # what `up` refuses is refused here
    root = os.geteuid() == 0
    unit = _unit(arguments.up, Path(chosen.dir).absolute(), root=root)
    if arguments.action == "show":
        print(unit, end="")
        return 0
    units = Path("/etc/systemd/system") if root else Path.home() / ".config/systemd/user"
    file = (arguments.unit_dir or units) / f"{arguments.name}.service"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(unit)
    systemctl = "systemctl" if root else "systemctl --user"
    print(f"wrote {file}\n  {systemctl} daemon-reload\n  {systemctl} enable --now {arguments.name}")
    return 0


def _unit(words: list[str], directory: Path, *, root: bool) -> str:
    if not any(word.partition("=")[0] == "--dir" for word in words):
        words = [*words, "--dir", str(directory)]
    return UNIT.format(
        directory=_escaped(str(directory)),
        user=f"User={pwd.getpwuid(os.geteuid()).pw_name}\n" if root else "",  # with it systemd sets HOME
        folder=_escaped(str(Path.cwd())),
        start=_line([sys.executable, "-m", "millrace.cli", "up", *words]),
        target="multi-user.target" if root else "default.target",
    )


def _line(words: list[str]) -> str:
    """A command as systemd reads it: quoted, with its specifiers and variables as they are."""
    return " ".join('"' + _escaped(word).replace("$", "$$") + '"' for word in words)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
