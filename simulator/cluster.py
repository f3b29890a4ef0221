"""The composition root of simulated clusters: every actor that a simulation runs is built and hosted here.

A cluster is a table of services (services.py) and the actors that are added, each by its role and configuration::

    cluster = SimulatedCluster(Simulation(seed=7))
    cluster.services[Role.COORDINATOR] = services.coordinator()
    cluster.add(Role.COORDINATOR, CoordinatorConfig(name="coordinator-0", bus=BUS))

Scenarios from files (scenarios/cluster.py) and the soak (soak/cluster.py) choose services and configurations; that is
all in which they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from random import Random
from typing import Any

from millrace.actor.actor import Actor
from millrace.actor.config import BusConfig
from millrace.actor.deps import ActorDeps
from millrace.contracts.catalog import Role
from millrace.contracts.local import StopRequested
from millrace.contracts.subjects import Subjects
from millrace.sim.engine_sim import SimulatedEngine
from millrace.sim.kv_network import SimKvNetwork
from millrace.sim.process import SimActor
from millrace.sim.runtime_sim import Simulation

from simulator.process_restarter import WATCH_NS, ProcessRestarter
from simulator.services import SimService

#: Name of every simulated cluster.
CLUSTER = "sim"

#: Bus configuration of each actor.
BUS = BusConfig(cluster=CLUSTER)


class SimulatedCluster:
    """Actors on a simulation, by role.

    Attributes:
        services: What ``add`` may add, by role.
        engines: Engine of each instance's present incarnation, by the instance's name.
        network: Carries KV between the engines; None where nothing moves.
        restarter: Starts again what died; None until ``restart_dead``.
    """

    def __init__(self, simulation: Simulation, *, network: SimKvNetwork | None = None) -> None:
        self.simulation = simulation
        self.subjects = Subjects(CLUSTER)
        self.services: dict[Role, SimService] = {}
        self.engines: dict[str, SimulatedEngine] = {}
        self.network = network
        self.restarter: ProcessRestarter | None = None
        self._actors: dict[Role, list[SimActor]] = {}

    def add(self, role: Role, config: Any) -> SimActor:
        """Adds an actor, on a node of its own with its name, and starts it.

        Args:
            config: As the role's service takes it; ``name`` is the actor's.
        """
        service = self.services[role]
        actor = self.simulation.add(
            partial(self._build, role, config),
            node=config.name,
            accepts=service.accepts,
            handlers=None if service.handlers is None else partial(service.handlers, config),
            role=role,
        )
        self._actors.setdefault(role, []).append(actor)
        return actor

    def change(self, role: Role, actor: SimActor, config: Any) -> None:
        """Ends a process; it starts again with another configuration."""
        actor.factory = partial(self._build, role, config)
        if actor.process is not None:
            actor.process.deliver(StopRequested())

    def build_actor(self, role: Role, config: Any, deps: ActorDeps) -> Actor:
        """Builds one incarnation. Tests override it, to put a faulty actor in the place of a right one."""
        return self.services[role].build(config, deps)

    def _build(self, role: Role, config: Any, incarnation: int) -> Actor:
        rng = Random(f"{self.simulation.seed}/{config.name}/{incarnation}")
        return self.build_actor(role, config, ActorDeps(incarnation=incarnation, rng=rng))

    def of_role(self, role: Role) -> list[SimActor]:
        """Actors of one role, running or not, in the order in which they were added."""
        return self._actors.get(role, [])

    @property
    def restarts(self) -> int:
        return self.restarter.restarts if self.restarter is not None else 0

    @property
    def ingresses(self) -> list[SimActor]:
        return self.of_role(Role.INGRESS)

    @property
    def workers(self) -> list[SimActor]:
        return self.of_role(Role.WORKER)

    @property
    def migrators(self) -> list[SimActor]:
        return self.of_role(Role.MIGRATOR)

    def actors(self) -> Iterator[tuple[Role, SimActor]]:
        return ((role, actor) for role, actors in self._actors.items() for actor in actors)

    def nodes(self) -> list[str]:
        return [actor.node.name for _role, actor in self.actors()]

    def restart_dead(self, after_ns: Callable[[], int], *, but: Collection[Role] = ()) -> None:
        """Starts again whoever dies from now on.

        Args:
            after_ns: From noticing it to the start; asked each time.
            but: Roles restarted elsewhere.
        """
        self.restarter = ProcessRestarter(self.simulation, self.subjects, restart_after_ns=after_ns)
        self.simulation.after(WATCH_NS, self._watch, self.restarter, frozenset(but))

    def _watch(self, restarter: ProcessRestarter, but: frozenset[Role]) -> None:
        restarter.look((role, actor) for role, actor in self.actors() if role not in but)
        self.simulation.after(WATCH_NS, self._watch, restarter, but)
