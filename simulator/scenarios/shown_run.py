"""A page that looks on at a run in virtual time, and serves it afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from millrace.actor.actor import Actor
from millrace.actor.config import BusConfig
from millrace.contracts.catalog import Role
from millrace.contracts.message import Body, Message
from millrace.sim.runtime_sim import Simulation

from services.page.actor import ACCEPTS, PageActor
from services.page.config import PageConfig
from services.page.effects import ShowFrame, ViewersCounted
from services.page.history import FrameHistory
from services.page.server import PageServer


class ShownRun:
    """The page of one run.

    Attributes:
        history: Its frames.
    """

    def __init__(self, port: int) -> None:
        """``port``: where it is served; 0 for any free one."""
        self._port = port
        self.history = FrameHistory()

    def join(self, simulation: Simulation, cluster: str) -> None:
        """Looks on from now; it hears what an observer may hear."""
        self._config = PageConfig(name="page", port=self._port, bus=BusConfig(cluster=cluster))

        def make(incarnation: int) -> Actor:
            self._actor = PageActor(self._config, incarnation=incarnation)
            self._actor.handle(Message(ViewersCounted(count=1)), incarnation)  # as often as for somebody there
            return self._actor

        simulation.add(
            make, node="page", accepts=ACCEPTS, role=Role.OBSERVER, handlers=lambda _process: {ShowFrame: self._keep}
        )

    def _keep(self, frame: ShowFrame) -> None:
        self.history.keep(frame.at_ms, frame.data, self._actor.whole)

    async def serve(self, say: Callable[[str], None]) -> None:
        """Serves it until it is cancelled.

        Raises:
            OSError: the port is taken.
        """
        self._actor.tables.put("c", "page", recorded=True)
        server = PageServer(self._config, self._actor, self._deliver, self.history)
        server.at_ms = self.history.spans()[-1][1]
        port = await server.start()
        say(f"look: http://127.0.0.1:{port}/   (Ctrl-C ends it)")
        try:
            await asyncio.Event().wait()
        finally:
            server.close()

    def _deliver(self, body: Body) -> None:
        self._actor.handle(Message(body), self.history.spans()[-1][1] * 1_000_000)
