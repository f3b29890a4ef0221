"""Runs a page: ``python -m services.page --config FILE``."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from typing import Any

from millrace.actor.deps import ActorDeps
from millrace.actor.effects import Effect
from millrace.actor.runtime_nats import ActorHandle
from millrace.contracts.message import Body
from millrace.hosting.service import host

from services.page.actor import ACCEPTS, PageActor
from services.page.config import PageConfig
from services.page.effects import ShowFrame
from services.page.history import PageRun
from services.page.server import PageServer


class PageShell:
    """Builds the actor, and serves what it shows."""

    _server: PageServer | None = None

    def build(self, config: PageConfig, deps: ActorDeps) -> PageActor:
        actor = PageActor(config, incarnation=deps.incarnation)
        self._server = PageServer(config, [PageRun("live", actor)], self._deliver)
        return actor

    def _deliver(self, body: Body) -> None:
        self._handle.deliver(body)

    def handlers(self) -> Mapping[type[Effect], Callable[[Any], None]]:
        assert self._server is not None, "it is built first"
        return {ShowFrame: self._server.show}

    def attach(self, handle: ActorHandle) -> None:
        self._handle = handle
        self._starting = asyncio.get_running_loop().create_task(self._listen())

    async def _listen(self) -> None:
        assert self._server is not None, "it is built first"
        try:
            await self._server.start()
        except OSError as error:
            sys.exit(f"page: it cannot listen: {error.strerror}")

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


if __name__ == "__main__":
    shell = PageShell()
    sys.exit(host("page", PageConfig, ACCEPTS, shell.build, shell_of=lambda _config: shell))
