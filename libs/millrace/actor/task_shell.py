"""Shell of a service whose effects take a while: tasks beside the actor, whose results go to it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from millrace.actor.runtime_nats import ActorHandle
from millrace.contracts.message import Body


class TaskShell:
    """Owns the tasks of one process. Its methods run on the event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._handle: ActorHandle | None = None

    def attach(self, handle: ActorHandle) -> None:
        self._handle = handle

    def tell(self, body: Body) -> None:
        assert self._handle is not None
        self._handle.deliver(body)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
