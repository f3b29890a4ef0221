"""Forks workers through the worker fork server, and reports them as if they were the supervisor's own children."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from millrace.contracts.message import Body
from millrace.supervision.worker_fork_client import ForkFailed, WorkerForkClient, WorkerForkServerLost

from services.supervisor.config import ChildSpec
from services.supervisor.effects import ChildExited, ChildReady, ChildStarted

#: How long the worker fork server may take to import vLLM, seconds. It takes 5 to 15; a cold disk a minute.
IMPORT_LIMIT_S = 120.0


class WorkerForker:
    """Holds the connection to the worker fork server that runs at present."""

    def __init__(self, socket: Path, notify: Callable[[Body], None]) -> None:
        self._socket = socket
        self._notify = notify
        self._client: WorkerForkClient | None = None
        self._names: dict[int, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def attend(self, name: str) -> None:
        """A worker fork server process was started: ChildReady once it has imported vLLM and listens."""
        self._keep(self._connect(name))

    def fork(self, spec: ChildSpec, log: Path) -> None:
        """Begins a fork: ChildStarted, or ChildExited with the reason."""
        self._keep(self._fork(spec, log))

    def adopt(self, name: str, pid: int) -> None:
        """A worker that an earlier supervisor has asked for."""
        self._names[pid] = name

    async def _connect(self, name: str) -> None:
        client = WorkerForkClient(self._socket, on_exit=self._on_exit, on_lost=self._on_lost)
        try:
            await client.connect(IMPORT_LIMIT_S)
        except WorkerForkServerLost:
            return  # its end is reported as that of any child; a start that hangs shows as "starting"
        self._client = client
        self._notify(ChildReady(name=name))

    async def _fork(self, spec: ChildSpec, log: Path) -> None:
        try:
            if self._client is None:
                raise WorkerForkServerLost("there is no worker fork server")
            pid = await self._client.fork(spec.fork_config, log=log, cores=[spec.core] if spec.core >= 0 else None)
        except (ForkFailed, WorkerForkServerLost) as error:
            self._notify(ChildExited(name=spec.name, pid=0, status=1, detail=str(error)))
            return
        self._names[pid] = spec.name
        self._notify(ChildStarted(name=spec.name, pid=pid))

    def _on_exit(self, pid: int, status: int) -> None:
        name = self._names.pop(pid, None)
        if name is not None:
            self._notify(ChildExited(name=name, pid=pid, status=status))

    def _on_lost(self) -> None:
        """The fork server ended, and its workers with it: report their ends."""
        self._client = None
        lost, self._names = self._names, {}
        for pid, name in lost.items():
            self._notify(
                ChildExited(
                    name=name, pid=pid, status=1, detail="the worker fork server ended, and its workers with it"
                )
            )

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
