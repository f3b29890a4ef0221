"""Starts this repository's programs for tests and benches: by fork from a process that has them imported, else by exec.

A session of tests that starts many calls ``open_fork_server`` before it has threads; where none is open, each program
imports for itself, as it does for a user. What runs is the same either way.
"""

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from millrace.supervision.fork_server import ForkServer, ForkServerLost

from deployment.local_supervisor import SERVICES

#: What else tests start again and again.
PROGRAMS = (
    *SERVICES,
    "deployment.config_check",
    "services.supervisor.__main__",
    "millrace.cli.cluster_view",
    "millrace.cli.up",
    "millrace.cli.__main__",
)

#: Pause between two looks whether a program has ended, seconds.
LOOK_S = 0.005

_servers: list[ForkServer] = []


class ForkedProgram:
    """A child of this process that a fork server has started: the part of ``subprocess.Popen`` that is used here."""

    def __init__(self, pid: int, words: Sequence[str]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._words = words

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end; raises TimeoutExpired."""
        until_s = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if until_s is not None and time.monotonic() > until_s:
                raise subprocess.TimeoutExpired(list(self._words), timeout or 0.0)
            time.sleep(LOOK_S)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


#: A started program.
Program = subprocess.Popen[bytes] | ForkedProgram


def open_fork_server(*preload: str) -> None:
    """Opens the fork server of this session, where there is none. Where it cannot be, programs start by exec."""
    if not _servers:
        server = ForkServer.open([*PROGRAMS, *preload])
        _servers.extend([server] if server is not None else [])


def start_program(
    module: str,
    arguments: Sequence[str],
    *,
    output: IO[bytes],
    own_session: bool = False,
    environment: dict[str, str] | None = None,
) -> Program:
    """Starts ``python -m module`` in the working directory, its standard output and error to a file."""
    if _servers:
        fields = {"output": output.fileno(), "own_session": own_session, "environment": environment}
        try:
            pid = _servers[0].start(module, arguments, cores=sorted(os.sched_getaffinity(0)), **fields)  # type: ignore[arg-type]
            return ForkedProgram(pid, [module, *arguments])
        except ForkServerLost as lost:
            _servers.clear()
            sys.stderr.write(f"programs start by exec from here on: {lost}\n")
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=own_session,
        env=environment,
    )


def ended(pid: int) -> bool:
    """Whether a process is gone, or only its entry is left for its parent to read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def environment(folder: Path, *, without: str = "") -> Path:
    """Another virtual environment, which has the packages of this one; returns its Python. ``without``: one module."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/*/site-packages")
    lacks = f"import sys; sys.modules[{without!r}] = None\n"
    (site / "these.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n{lacks}")
    shutil.copy(Path(sys.executable).with_name("nats-server"), folder / "bin")
    return folder / "bin" / "python"


def output_of(
    module: str, arguments: Sequence[str], *, environment: dict[str, str] | None = None, limit_s: float = 60.0
) -> tuple[int, str]:
    """Runs a program to its end; returns its exit status and what it wrote. Raises TimeoutExpired after killing it."""
    with tempfile.TemporaryFile() as output:
        program = start_program(module, arguments, output=output, environment=environment)
        try:
            status = program.wait(timeout=limit_s)
        finally:
            program.kill()
        output.seek(0)
        return status, output.read().decode(errors="replace")
