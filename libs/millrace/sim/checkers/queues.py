"""Every queue has a bound: snapshots are compared with it now and then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millrace.sim.checkers import Checker

if TYPE_CHECKING:
    from millrace.sim.runtime_sim import Simulation


class BoundedQueues(Checker):
    """Sizes in the actors' snapshots stay within bounds.

    ``bounds`` maps a snapshot's key to the largest size; values that are no numbers count with their length. A key that
    no snapshot had fails at the end: it would bound nothing.
    """

    def __init__(self, bounds: dict[str, int]) -> None:
        self._bounds = bounds
        self._unseen = set(bounds)
        self._without: set[type] = set()  # actors whose snapshots have none of these keys: they are dear to make

    def on_interval(self, simulation: Simulation) -> None:
        for name, actor in simulation.actors.items():
            if actor.process is None or type(actor.actor) in self._without:
                continue
            snapshot = actor.actor.snapshot()
            if not self._bounds.keys() & snapshot.keys():
                self._without.add(type(actor.actor))
            self._unseen -= snapshot.keys()
            for key, bound in self._bounds.items():
                value = snapshot.get(key, 0)
                size = value if isinstance(value, int) else len(value)
                assert size <= bound, f"seed {simulation.seed}: {key} of {name} is {size}, at most {bound}"

    def on_end(self, simulation: Simulation) -> None:
        self.on_interval(simulation)
        assert not self._unseen, f"no actor's snapshot has {sorted(self._unseen)}"
