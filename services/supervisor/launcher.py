"""Starts and signals processes for the supervisor: the one place here that touches the operating system."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from millrace.contracts.message import Body
from millrace.files import file_text, open_private
from millrace.hosting.control_groups import group_memory
from millrace.supervision.fork_server import ForkServer, ForkServerLost

from services.supervisor.config import ChildSpec, Imports
from services.supervisor.effects import ChildExited, ChildStarted, SignalChild, StartChild

#: A log that has grown beyond this is begun anew; one older file is kept.
LOG_BYTES_MAX = 32 * 1024 * 1024

#: Of a log's end, for a person: the tracebacks of an engine's process and of its worker.
TAIL_BYTES = 64 * 1024

#: By what they have imported.
ForkServers = Mapping[Imports, ForkServer]


class Launcher:
    """Runs children as processes in groups of their own, each with its log file.

    Children outlive this process where it is killed: the next supervisor takes them over.

    Args:
        fork_servers: Those there are. Without one, or once it is lost, children start by exec. Either way they are
            children of this process.
    """

    def __init__(self, log_dir: Path, notify: Callable[[Body], None], fork_servers: ForkServers | None = None) -> None:
        self._log_dir = log_dir
        self._notify = notify
        self._fork_servers = dict(fork_servers or {})
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = False
        self._oom_kills = _oom_kills()

    def log_path(self, name: str) -> Path:
        return self._log_dir / f"{name}.log"

    def start(self, effect: StartChild) -> None:
        self._keep(self._run(effect.spec))

    def end_starts(self) -> None:
        """Gives up starts that wait for imports: ChildExited tells of each. Nothing is started by fork from now on."""
        self._ended = True
        for server in self._fork_servers.values():
            server.close()

    def adopt(self, spec: ChildSpec, pid: int) -> None:
        """Takes over a process that an earlier supervisor has started."""
        self._keep(self._watch(spec.name, pid))

    async def _watch(self, name: str, pid: int) -> None:
        """It is no child of this process: its status is another one's to read."""
        await _in_thread(lambda: _wait_for_end(pid), f"pidfd-{pid}")
        self._notify(
            ChildExited(name=name, pid=pid, status=0, detail="it ended (an earlier supervisor had started it)")
        )

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
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_private(path, "ab") as log:
            try:
                pid = await self._start(spec, log.fileno())
            except OSError as error:
                self._notify(ChildExited(name=spec.name, pid=0, status=127, detail=str(error)))
                return
        self._notify(ChildStarted(name=spec.name, pid=pid))
        status = await _exit_status(pid)
        before, self._oom_kills = self._oom_kills, _oom_kills()
        self._notify(ChildExited(name=spec.name, pid=pid, status=status, oom_kills=self._oom_kills - before))

    async def _start(self, spec: ChildSpec, log: int) -> int:
        """Starts a child by fork where that can be, else by exec; returns its pid."""
        server = self._fork_servers.get(spec.imports)
        if server is not None and spec.command[:2] == [sys.executable, "-m"]:
            module, *arguments = spec.command[2:]
            try:
                start = partial(server.start, module, arguments, output=log, outlives=True)
                return await _in_thread(start, f"fork-{spec.name}")
            except ForkServerLost as lost:
                if self._ended:
                    raise OSError("nothing is started any more") from None
                if self._fork_servers.pop(spec.imports, None) is not None:
                    server.close()
                    what = "services" if spec.imports is Imports.SERVICES else "engines"
                    sys.stderr.write(f"{what} start slower from here on, each by itself: {lost}\n")
        return _start_by_exec(spec.command, log)


def _start_by_exec(command: list[str], log: int) -> int:
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    process.returncode = 0  # its status is read by pid, as that of a forked one
    return process.pid


def _oom_kills() -> int:
    return group_memory(file_text("/proc/self/cgroup"))[2]


async def _exit_status(pid: int) -> int:
    """Waits for a child's end; a signal that ended it is negative."""
    return await _in_thread(lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), f"waitpid-{pid}")


def _wait_for_end(pid: int) -> int:
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll()
        finally:
            os.close(descriptor)
    return 0


async def _in_thread(work: Callable[[], int], name: str) -> int:
    """Does work in a thread of its own, which does not keep this process from ending."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[int] = loop.create_future()

    def run() -> None:
        try:
            tell = partial(result.set_result, work())
        except ForkServerLost as lost:
            tell = partial(result.set_exception, lost)
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody asks any more
            loop.call_soon_threadsafe(lambda: result.done() or tell())  # done: cancelled, by Ctrl-C during the start

    threading.Thread(target=run, name=name, daemon=True).start()
    return await result


def last_lines(path: Path, count: int) -> list[str]:
    """The end of a log; nothing where there is none."""
    if not path.is_file():
        return []
    with path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = log.read().decode(errors="replace").splitlines()
    return [line for line in lines if line.strip()][-count:]


def bound_logs(folder: Path, bytes_max: int = LOG_BYTES_MAX) -> None:
    """Begins logs anew that have grown beyond ``bytes_max`` while their processes append to them.

    What was in NAME.log is in NAME.log.1 then; lines that are written meanwhile, within microseconds, are lost.
    """
    for log in folder.glob("*.log"):
        with contextlib.suppress(OSError):  # a full disk has no room for the copy: again with the next look
            if log.stat().st_size > bytes_max:
                old = log.with_name(f"{log.name}.1")
                old.unlink(missing_ok=True)
                shutil.copy(log, old)
                os.truncate(log, 0)
