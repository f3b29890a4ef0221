"""Starts a cluster on this machine: nats-server, ingress, tagger, predictor, coordinator, migrators and engines, under
one supervisor.

By default it runs one real vLLM engine per core (at most four) with a model that ships with Millrace, in the
foreground; Ctrl-C stops everything. With --detach it runs in the background; `millrace down` stops it. A predictor
forecasts placements for the default dispatch policy. Options describe the cluster, or a file does (--cluster);
`millrace cluster show` prints a running cluster as such a file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from millrace.cli.cluster import SUPERVISOR_MODULE
from millrace.cli.cluster_flags import add_cluster_options, cluster_of
from millrace.cli.errors import CliError
from millrace.cluster.spec import ClusterSpec
from millrace.files import open_private
from millrace.supervision.cluster_folder import command
from millrace.supervision.fork_server import run_module, set_title
from millrace.supervision.survivors import created

#: How long --detach waits for the banner: as long as the supervisor itself waits for readiness, and a little more.
DETACHED_WAIT_S = 620.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this verb's options."""
    add_cluster_options(parser)
    parser.add_argument(
        "--dir", default=os.environ.get("MILLRACE_DIR", ".millrace"), help="folder of the cluster's files"
    )
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="where a cluster runs in the folder: end its supervisor alone, and go on with its processes",
    )
    parser.add_argument("-d", "--detach", action="store_true", help="return once it is ready")


def run(arguments: argparse.Namespace) -> int:
    """Hands over to the supervisor."""
    return start(arguments, cluster_of(arguments, len(os.sched_getaffinity(0))))


def start(arguments: argparse.Namespace, spec: ClusterSpec, **further: Any) -> int:
    """Runs the supervisor of a specification, with further fields of its options: in this process if not detached."""
    directory = Path(arguments.dir).absolute()
    try:
        (directory / "run").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CliError(f"--dir {directory}: {error.strerror}") from None
    if arguments.take_over:
        _end_supervisor(directory)
    options = {"directory": str(directory), "spec": msgspec.to_builtins(spec), **further}
    words = [SUPERVISOR_MODULE, "--options", json.dumps(options)]
    if arguments.detach:
        return _detach([sys.executable, "-m", *words], directory)
    sys.argv = words  # an exec would import half a second's modules again
    set_title(f"{sys.executable} -m {SUPERVISOR_MODULE} --options {json.dumps({'directory': str(directory)})}")
    return run_module(SUPERVISOR_MODULE)


def _end_supervisor(directory: Path) -> None:
    """Ends a supervisor at once, so that it ends nothing."""
    from millrace.cli.down import running_supervisor  # with psutil, which other starts do not need

    if (supervisor := running_supervisor(directory)) is not None:
        of = created(supervisor.pid)
        supervisor.kill()
        while of and created(supervisor.pid) == of:  # also one that nobody waits for ends
            time.sleep(0.02)


def _detach(words: list[str], directory: Path) -> int:
    (directory / "logs").mkdir(parents=True, exist_ok=True)
    banner = directory / "run" / "banner.txt"
    log = directory / "logs" / "up.log"
    began = time.time()
    # Appended to: where a cluster runs here already, this file is its log, and what starts now will only say so.
    with open_private(log, "ab") as output:
        before = output.tell()
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    stop = command("down", directory)
    try:
        while time.time() - began < DETACHED_WAIT_S:
            if process.poll() is not None:
                raise CliError(f"it did not start:\n{_since(log, before) or 'in the foreground it says why'}")
            if banner.is_file() and banner.stat().st_mtime >= began:
                print(_note(_since(log, before)), end="")
                print(f"{banner.read_text()}It runs in the background; `{stop}` stops it.")
                return 0
            time.sleep(0.05)
    except KeyboardInterrupt:
        print(f"millrace up: it goes on starting in the background; `{stop}` stops it", file=sys.stderr)
        raise
    raise CliError(f"not ready after {DETACHED_WAIT_S:.0f} s; see {log}")


def _note(said: str) -> str:
    """The supervisor's note on a cluster that was not stopped in order: its first two lines, where there is one."""
    return "".join(f"{line}\n" for line in said.splitlines()[:2]) if said.startswith("note: ") else ""


def _since(log: Path, offset: int) -> str:
    return log.read_bytes()[offset:].decode(errors="replace").strip().removeprefix("millrace up: ")
