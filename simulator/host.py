"""A host of simulated workers: the supervisor's own actor, over processes that exist in virtual time only.

    host = SimulatedHost(simulation, HostShape(cluster="sim", model="m", running=("w0",), spares=("w1", "w2")),
                         workers={"w0": actor}, add_worker=add)

``add_worker`` adds a worker's actor to the simulation under a name and returns it; it is called when the first cold
start of a name is over. Later starts of the name begin a new incarnation of the same actor. The host restarts its
workers itself: whoever composes a cluster must not do it as well.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from itertools import count
from types import MappingProxyType

import msgspec
from millrace.actor.config import BusConfig
from millrace.actor.deps import ActorDeps, actor_rng
from millrace.contracts.catalog import Role
from millrace.contracts.local import StopRequested
from millrace.contracts.message import Body
from millrace.sim.process import Handlers, SimActor, SimProcess
from millrace.sim.runtime_sim import SECOND, Simulation

from services.supervisor.actor import ACCEPTS, SupervisorActor
from services.supervisor.build import build
from services.supervisor.config import ChildSpec, SupervisorConfig
from services.supervisor.effects import ChildExited, ChildStarted, SignalChild, StartChild
from simulator.process_restarter import WATCH_NS

#: Kind of the devices of a simulated host.
DEVICE = "device"


class HostShape(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated machine.

    Attributes:
        devices: Devices that its workers share, one each; 0 for no bound.
        host: Name under which provisioning reaches it.
        model: Served by workers that ``kinds`` does not name.
        running: Workers that run when it is made.
        spares: Names of those that may be started.
        kinds: Model and shape of a worker, by name.
        cold_start_ns: From the start of a process to its first word: loading the model.
    """

    cluster: str
    model: str
    devices: int = 0
    host: str = "local"
    running: tuple[str, ...] = ()
    spares: tuple[str, ...] = ()
    kinds: Mapping[str, tuple[str, str]] = MappingProxyType({})
    cold_start_ns: int = 30 * SECOND


class SimulatedHost:
    """The shell of a simulated supervisor.

    Attributes:
        workers: Every worker that ever ran here, by name.
    """

    def __init__(
        self,
        simulation: Simulation,
        shape: HostShape,
        *,
        workers: Mapping[str, SimActor],
        add_worker: Callable[[str], SimActor],
    ) -> None:
        """``workers``: the actors of ``shape.running``."""
        self.workers = dict(workers)
        self._simulation = simulation
        self._shape = shape
        self._add_worker = add_worker
        self._numbers = count(1)
        self._pids: dict[str, int] = {}
        self._up: dict[str, SimProcess | None] = {}
        for name in shape.running:
            self._pids[name], self._up[name] = next(self._numbers), self.workers[name].process
        self.supervisor = simulation.add(
            self._build, node=f"supervisor-{shape.host}", accepts=ACCEPTS, handlers=self._handlers, role=Role.SUPERVISOR
        )
        simulation.after(WATCH_NS, self._watch)

    def up(self) -> list[str]:
        """Workers that hold a device: their process runs, or loads its model."""
        return sorted(self._pids)

    def _build(self, incarnation: int) -> SupervisorActor:
        shape = self._shape
        name = f"supervisor-{shape.host}"
        machine = SupervisorConfig(
            name=name,
            bus=BusConfig(cluster=shape.cluster),
            host=shape.host,
            devices={DEVICE: shape.devices} if shape.devices else {},
            children=[_worker(name, shape) for name in shape.running],
            spares=[_worker(name, shape) for name in shape.spares],
        )
        actor = build(machine, ActorDeps(incarnation=incarnation, rng=actor_rng(name, incarnation)))
        for name in shape.running:
            actor.adopt(name, self._pids[name], incarnation)
        return actor

    def _handlers(self, _process: SimProcess) -> Handlers:
        return {StartChild: self._on_start, SignalChild: self._on_signal}

    def _on_start(self, effect: StartChild) -> None:
        name, pid = effect.spec.name, next(self._numbers)
        self._pids[name] = pid
        self._up.pop(name, None)
        self._tell(ChildStarted(name=name, pid=pid))
        self._simulation.after(self._shape.cold_start_ns, self._come_up, name, pid)

    def _come_up(self, name: str, pid: int) -> None:
        if self._pids.get(name) != pid:
            return  # it was ended while it loaded
        if name in self.workers:
            self._simulation.start(self.workers[name])
        else:
            self.workers[name] = self._add_worker(name)
        self._up[name] = self.workers[name].process

    def _on_signal(self, effect: SignalChild) -> None:
        if self._pids.get(effect.name) != effect.pid:
            return
        process = self._up.get(effect.name)
        if process is None:
            self._ended(effect.name, -effect.signal)
        elif effect.signal == signal.SIGKILL:
            self._simulation.faults.kill(self.workers[effect.name])
        elif process.alive:
            process.deliver(StopRequested())

    def _watch(self) -> None:
        for name, process in list(self._up.items()):
            actor = self.workers[name]
            if process is None and actor.process is not None:  # it waited for the bus
                self._up[name] = actor.process
            elif process is None and not actor.starting:  # killed while it waited
                self._ended(name, -int(signal.SIGKILL))
            elif actor.process is not process:
                drained = process is not None and process.stop_reason is not None
                self._ended(name, 0 if drained else -int(signal.SIGKILL))
        self._simulation.after(WATCH_NS, self._watch)

    def _ended(self, name: str, status: int) -> None:
        self._up.pop(name, None)
        self._tell(ChildExited(name=name, pid=self._pids.pop(name), status=status))

    def _tell(self, body: Body) -> None:
        if self.supervisor.process is not None:
            self.supervisor.process.deliver(body)


def _worker(name: str, shape: HostShape) -> ChildSpec:
    model, kind = shape.kinds.get(name, (shape.model, ""))
    return ChildSpec(
        name=name,
        role=Role.WORKER,
        presences=[name],
        stop_order=2,
        stop_limit_ms=15_000,
        model=model,
        device=DEVICE,
        devices=1,
        shape=kind,
    )
