"""The two buses behind one face: virtual time, and a real nats-server."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nats
from millrace.actor.config import BusConfig
from millrace.actor.effects import Effect, Log, RecordSpan
from millrace.actor.runtime_nats import ActorHandle, NatsRuntime
from millrace.contracts.message import Body
from millrace.sim.runtime_sim import SECOND, SimActor, Simulation
from prometheus_client import CollectorRegistry

from tests.contract.bus.probe import Do, Probe
from tests.testbed.nats_process import NatsProcess

#: How long a test waits for what must come, seconds. Only a failing test waits so long.
PATIENCE_S = 20.0


class Logged:
    """Keeps log effects."""

    def __init__(self) -> None:
        self.events: list[Log] = []

    def log(self, actor: str, effect: Log) -> None:
        self.events.append(effect)

    def span(self, actor: str, effect: RecordSpan) -> None:
        """No spans here."""


class SimHarness:
    """Virtual time: a second of a test costs what happens in it."""

    def __init__(self, seed: int) -> None:
        self.cluster = "contract"
        self.simulation = Simulation(seed)
        self._actors: dict[str, SimActor] = {}

    async def add(self, probe: Probe, *accepts: type[Body]) -> Probe:
        """Starts a probe in a process of its own; returns it."""
        self._actors[probe.name] = self.simulation.add(lambda _incarnation: probe, node=probe.name, accepts=accepts)
        self.simulation.run_for(SECOND // 100)
        return probe

    def tell(self, probe: Probe, *effects: Effect) -> None:
        """Has a probe return effects now."""
        process = self._actors[probe.name].process
        process.deliver(Do(effects=list(effects)))

    async def until(self, condition: Callable[[], Any]) -> None:
        """Lets time pass until the condition holds; fails after PATIENCE_S."""
        end_ns = self.simulation.now_ns + int(PATIENCE_S * SECOND)
        while not condition():
            assert self.simulation.now_ns < end_ns, "it did not come"
            self.simulation.run_for(SECOND // 1000)

    async def passes(self, seconds: float) -> None:
        self.simulation.run_for(int(seconds * SECOND))

    async def publish_bytes(self, subject: str, payload: bytes, sender: str = "") -> None:
        """Puts bytes on the bus from outside."""
        self.simulation.publish(subject, payload, sender=sender)

    def refused(self) -> int:
        """Messages that reached a runtime and no actor."""
        return self.simulation.counts.get("refused", 0)

    async def stop_bus(self, *, keep_store: bool = True) -> None:
        self.simulation.faults.stop_bus(keep_store=keep_store)

    async def start_bus(self) -> None:
        self.simulation.faults.start_bus()

    async def close(self) -> None:
        """Nothing is held."""


class NatsHarness:
    """A real nats-server, one NatsRuntime per node.

    With ``local`` all probes share one node, whose actors reach each other in the process.
    """

    def __init__(self, folder: Path, *, local: bool = False) -> None:
        self.cluster = "contract"
        self._local = local
        self.logged = Logged()
        self._server = NatsProcess(folder)
        self._server.start()
        self._runtimes: dict[str, NatsRuntime] = {}
        self._handles: dict[str, ActorHandle] = {}
        self._runs: list[asyncio.Task[str]] = []

    async def add(self, probe: Probe, *accepts: type[Body]) -> Probe:
        node = "shared" if self._local else probe.name
        runtime = self._runtimes.get(node)
        if runtime is None:
            bus = BusConfig(cluster=self.cluster, servers=[self._server.url])
            runtime = NatsRuntime(
                bus=bus, name=node, telemetry=self.logged, registry=CollectorRegistry(), local=self._local
            )
            self._runtimes[node] = runtime
            await runtime.connect()
            self._runs.append(asyncio.create_task(runtime.run(signals=False)))
        self._handles[probe.name] = runtime.add(probe, accepts=accepts)
        await asyncio.sleep(0.05)  # the server has the subscriptions
        return probe

    def tell(self, probe: Probe, *effects: Effect) -> None:
        self._handles[probe.name].deliver(Do(effects=list(effects)))

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110 the condition is any predicate, nobody signals it
                await asyncio.sleep(0.002)

    async def passes(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def publish_bytes(self, subject: str, payload: bytes, sender: str = "") -> None:
        client = await nats.connect(self._server.url)
        await client.publish(subject, payload, headers={"Mr-Sender": sender} if sender else None)
        await client.close()

    def refused(self) -> int:
        return sum(runtime.meter.refused.total() for runtime in self._runtimes.values())

    async def stop_bus(self, *, keep_store: bool = True) -> None:
        self._server.kill(keep_store=keep_store)

    async def start_bus(self) -> None:
        self._server.start()

    async def close(self) -> None:
        for run in self._runs:
            run.cancel()
        failures = await asyncio.gather(*self._runs, return_exceptions=True)
        self._server.close()
        crashed = [f for f in failures if isinstance(f, Exception)]
        assert not crashed, crashed


Harness = SimHarness | NatsHarness
