"""Restarts dead processes of a simulated cluster after a delay, and publishes that they died, as a supervisor does."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from millrace.contracts.catalog import Role
from millrace.contracts.status import PresenceState, ServicePresence
from millrace.contracts.subjects import Subjects
from millrace.sim.process import SimActor
from millrace.sim.runtime_sim import MILLISECOND, Simulation

#: It sees that a process ended within this time.
WATCH_NS = 50 * MILLISECOND


class ProcessRestarter:
    """Whoever makes one calls ``look`` every WATCH_NS.

    Attributes:
        restarts: How often it started something again.
    """

    def __init__(self, simulation: Simulation, subjects: Subjects, *, restart_after_ns: Callable[[], int]) -> None:
        """Knows of no process that is down.

        Args:
            restart_after_ns: From seeing that a process ended to starting it again; asked each time.
        """
        self.restarts = 0
        self._simulation = simulation
        self._subjects = subjects
        self._restart_after_ns = restart_after_ns
        self._down: set[str] = set()

    def look(self, actors: Iterable[tuple[Role, SimActor]]) -> None:
        """Says who of these died since it looked last."""
        for role, actor in actors:
            if actor.process is None and not actor.starting and actor.name not in self._down:
                self._down.add(actor.name)
                self._say_dead(role, actor.name)
                self._simulation.after(self._restart_after_ns(), self._restart, actor)

    def _say_dead(self, role: Role, name: str) -> None:
        dead = ServicePresence(
            role=role, name=name, incarnation=0, at_ns=self._simulation.now_ns, state=PresenceState.DEAD
        )
        self._simulation.publish(self._subjects.presence(role, name), dead, sender="supervisor")

    def _restart(self, actor: SimActor) -> None:
        self._down.discard(actor.name)
        self.restarts += 1
        self._simulation.start(actor)
