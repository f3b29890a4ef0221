"""Starts and signals processes for the supervisor: the one place here that touches the operating system."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol

from millrace.contracts.message import Body
from millrace.telemetry.private_files import open_private

from services.supervisor.config import ChildSpec
from services.supervisor.effects import ChildExited, ChildStarted, SignalChild, StartChild

#: A log that has grown beyond this is begun anew at the next start of its child; one older file is kept.
LOG_BYTES_MAX = 64 * 1024 * 1024

#: Of a log's end, for a person.
TAIL_BYTES = 16 * 1024

_PR_SET_PDEATHSIG = 1


class Forker(Protocol):
    """Forks workers from a process that has vLLM imported (the zygote)."""

    def attend(self, name: str) -> None:
        """The zygote's process was started; notify hears ChildReady once it can fork."""
        ...

    def fork(self, spec: ChildSpec, log: Path) -> None:
        """Begins a fork; the launcher's notify hears ChildStarted or ChildExited."""
        ...


class Launcher:
    """Runs children as processes in groups of their own, each with its log file.

    A child gets SIGTERM if this process dies, so nothing outlives a killed supervisor.
    """

    def __init__(self, log_dir: Path, notify: Callable[[Body], None]) -> None:
        self._log_dir = log_dir
        self._notify = notify
        self._tasks: set[asyncio.Task[None]] = set()
        self.forker: Forker | None = None

    def log_path(self, name: str) -> Path:
        """Path of the log that takes a child's output."""
        return self._log_dir / f"{name}.log"

    def start(self, effect: StartChild) -> None:
        """Carries out StartChild."""
        spec = effect.spec
        if not spec.fork_config:
            self._keep(self._run(spec))
        elif self.forker is None:
            self._notify(ChildExited(name=spec.name, pid=0, status=1, detail="there is no zygote to fork it"))
        else:
            self.forker.fork(spec, self.log_path(spec.name))

    def signal(self, effect: SignalChild) -> None:
        """Carries out SignalChild, on the child's whole group where it is to be killed."""
        try:
            if effect.signal == signal.SIGKILL:
                os.killpg(effect.pid, signal.SIGKILL)
            else:
                os.kill(effect.pid, effect.signal)
        except (ProcessLookupError, PermissionError):
            pass  # it has ended; its exit is reported, or was already

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, spec: ChildSpec) -> None:
        path = self.log_path(spec.name)
        _rotate(path)
        with open_private(path, "ab") as log:
            try:
                process = await asyncio.create_subprocess_exec(
                    *spec.command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=_die_with_parent,
                )
            except OSError as error:
                self._notify(ChildExited(name=spec.name, pid=0, status=127, detail=str(error)))
                return
        self._notify(ChildStarted(name=spec.name, pid=process.pid))
        if spec.role == "zygote" and self.forker is not None:
            self.forker.attend(spec.name)
        status = await process.wait()
        self._notify(ChildExited(name=spec.name, pid=process.pid, status=status))


def last_lines(path: Path, count: int) -> list[str]:
    """The end of a log; nothing where there is none."""
    if not path.is_file():
        return []
    with path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = log.read().decode(errors="replace").splitlines()
    return [line for line in lines if line.strip()][-count:]


_libc = ctypes.CDLL(None)


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _rotate(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > LOG_BYTES_MAX:
        path.replace(path.with_suffix(".log.1"))
