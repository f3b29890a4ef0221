"""Runs a page: ``python -m services.page --config FILE``."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from typing import Any

from millrace.actor.effects import Effect
from millrace.actor.runtime_nats import ActorHandle
from millrace.contracts.message import Body
from millrace.hosting.service import host

from services.page.actor import ACCEPTS
from services.page.build import build
from services.page.config import PageConfig
from services.page.effects import ShowFrame, TellRequest
from services.page.server import PageServer


class PageShell:
    """Serves what the actor shows."""

    def __init__(self, config: PageConfig) -> None:
        self._config = config
        self._server = PageServer(config, self._deliver)

    def handlers(self) -> Mapping[type[Effect], Callable[[Any], None]]:
        return {ShowFrame: self._server.show, TellRequest: self._server.tell}

    def _deliver(self, body: Body) -> None:
        self._handle.deliver(body)

    def attach(self, handle: ActorHandle) -> None:
        self._handle = handle
        self._starting = asyncio.get_running_loop().create_task(self._listen())

    async def _listen(self) -> None:
        try:
            await self._server.start()
        except OSError as error:
            sys.exit(f"page: {self._config.host}:{self._config.port}: {error.strerror}")

    def close(self) -> None:
        self._server.close()


if __name__ == "__main__":
    sys.exit(host("page", PageConfig, ACCEPTS, build, shell_of=PageShell))
