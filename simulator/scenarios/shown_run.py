"""Runs in virtual time that a page shows: afterwards, or while they go on, with faults by a click."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec
from millrace.actor.actor import Actor
from millrace.actor.config import BusConfig
from millrace.contracts.catalog import Role
from millrace.contracts.local import TimerFired
from millrace.contracts.message import Message
from millrace.http.exchange import Exchange
from millrace.sim.runtime_sim import MILLISECOND, SECOND, Simulation

from services.page.actor import ACCEPTS, OrderGiven, PageActor, ShowFrame
from services.page.config import PageConfig
from services.page.server import PageServer
from simulator.scenarios.spec import FaultSpec

#: So fast may a run be watched, times real time.
PACES = ("0", "0.25", "1", "4", "16")

#: Harm that heals by itself lasts so long, s of virtual time.
FAULT_S = 10.0

#: A machine that fell behind real time catches up no more than this, s.
BEHIND_S = 0.2

#: Does harm to a run.
Harm = Callable[[FaultSpec], None]


class ShownRun:
    """A run that is shown afterwards.

    Attributes:
        look_ns: Virtual time between two calls of ``keep_pace``.
        harmed: Whether faults come that no scenario names.
        page: What is shown; from ``join`` on.
    """

    look_ns = SECOND
    harmed = False
    page: PageActor

    def __init__(self, name: str) -> None:
        """``name``: what viewers call it."""
        self._name = name

    def join(self, simulation: Simulation, cluster: str, begin_ns: int, harm: Harm) -> None:
        """Looks on from now; it hears what an observer may hear. ``begin_ns``: of the load."""

        def make(incarnation: int) -> Actor:
            self.page = shown_actor(cluster, incarnation, begin_ns, name=self._name)
            return self.page

        simulation.add(
            make, node="page", accepts=ACCEPTS, role=Role.OBSERVER, handlers=lambda _process: {ShowFrame: self.show}
        )

    def show(self, frame: ShowFrame) -> None:
        """Shows a frame to viewers. Here there are none yet."""

    def keep_pace(self) -> None:
        """Waits until real time is as far as virtual time. Here, never."""


class WatchedRun(ShownRun):
    """A run that viewers see as it goes on, and harm. It waits for the first of them."""

    look_ns = 50 * MILLISECOND
    harmed = True

    def __init__(self, name: str, port: int, say: Callable[[str], None]) -> None:
        """``port``: where it is served; 0 for any free one."""
        super().__init__(name)
        self._port, self._say = port, say
        self._loop = asyncio.new_event_loop()
        self._pace, self._due_s = 1.0, 0.0
        self._runs = asyncio.Event()
        self._runs.set()

    def join(self, simulation: Simulation, cluster: str, begin_ns: int, harm: Harm) -> None:
        """As of any shown run; and listens."""
        super().join(simulation, cluster, begin_ns, harm)
        self._simulation, self._begin_ns, self._harm = simulation, begin_ns, harm
        self.page.tables.put("c", "page", simulated=True, pace=self._pace)
        config = PageConfig(port=self._port, bus=BusConfig(cluster=cluster))
        self._server = SimulationServer(config, [self.page], self._ordered)
        self._loop.run_until_complete(_listen(self._server, self._say))
        while not self._server.viewers:
            self._loop.run_until_complete(asyncio.sleep(0.05))

    def show(self, frame: ShowFrame) -> None:
        self._server.show(frame)

    def keep_pace(self) -> None:
        """Waits, and lets viewers look and order meanwhile."""
        self._loop.run_until_complete(self._wait())

    async def _wait(self) -> None:
        await self._runs.wait()
        now_s = time.monotonic()
        self._due_s = max(self._due_s, now_s - BEHIND_S) + self.look_ns / SECOND / self._pace
        await asyncio.sleep(max(0.0, self._due_s - now_s))

    def _ordered(self, order: str) -> None:
        verb, _, whom = order.partition(" ")
        if verb == "pace":
            self._go(whom)
            return
        at_s = round((self._simulation.now_ns - self._begin_ns) / SECOND, 3)
        told = {"at_s": at_s, "kind": verb, "target": whom, "duration_s": FAULT_S}
        fault = msgspec.convert(told, FaultSpec)
        if fault.target and fault.target not in self._simulation.actors:
            raise ValueError(f"there is no {fault.target}")
        self._harm(fault)
        self._say("[[faults]]  # as in a scenario's file\n" + "\n".join(f"{k} = {v!r}" for k, v in told.items()))
        given = OrderGiven(text=order.replace("_", " "), code=0)
        self.page.handle(Message(given), self._simulation.now_ns)

    def _go(self, pace: str) -> None:
        if pace not in PACES:
            raise ValueError(f"a pace is one of {', '.join(PACES)}")
        if float(pace):
            self._pace = float(pace)
            self._runs.set()
        else:
            self._runs.clear()
        self.page.tables.put("c", "page", pace=float(pace))

    def serve(self) -> None:
        """Goes on to show what happened, until it is interrupted."""
        self.page.tables.put("c", "page", recorded=True, simulated=False, pace=1.0)
        for effect in self.page.handle(Message(TimerFired(name="frame")), self._simulation.now_ns):
            if isinstance(effect, ShowFrame):
                self.show(effect)
        self._loop.run_forever()


class SimulationServer(PageServer):
    """Serves a simulation as it goes on, which carries out orders itself: whoever may look may give them."""

    def __init__(self, config: PageConfig, runs: Sequence[PageActor], ordered: Callable[[str], None]) -> None:
        """``ordered``: carries out an order; raises ValueError for one that makes no sense."""
        super().__init__(config, runs)
        self._ordered = ordered

    def carry_out(self, exchange: Exchange, order: str, file: str) -> None:
        if not self.may_read(exchange):
            raise ValueError("a simulation is harmed where it may be watched only")
        self._ordered(order)
        exchange.respond(200, b"{}")


def shown_actor(cluster: str, incarnation: int, begin_ns: int, *, name: str) -> PageActor:
    """The actor of a page that is shown all of a run. ``begin_ns``: of its load; ``name``: what viewers call it."""
    actor = PageActor(PageConfig(bus=BusConfig(cluster=cluster)), incarnation=incarnation, kept_max=1_000_000)
    actor.tables.put("c", "page", begin=begin_ns // MILLISECOND, run=name)
    return actor


async def serve(runs: Sequence[PageActor], port: int, say: Callable[[str], None]) -> None:
    """Serves runs that are over, side by side, until it is cancelled."""
    for run in runs:
        run.tables.put("c", "page", recorded=True, runs=[each.tables.rows["c"]["page"]["run"] for each in runs])
    await _listen(PageServer(PageConfig(port=port), runs), say, "compare")
    await asyncio.Event().wait()


async def _listen(server: PageServer, say: Callable[[str], None], view: str = "") -> None:
    await server.start()
    say(f"look: http://127.0.0.1:{server.port}/{view}   (Ctrl-C ends it)")
