"""Invariants of every simulation. A checker raises AssertionError; the simulation then fails with its seed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millrace.actor.effects import Effect
    from millrace.contracts.message import Message
    from millrace.sim.process import SimProcess
    from millrace.sim.runtime_sim import Simulation


class Checker:
    """Looks on. Subclasses override what they need."""

    def on_handled(self, process: SimProcess, message: Message, effects: list[Effect]) -> None:
        """After each message, before its effects are carried out."""

    def on_interval(self, simulation: Simulation) -> None:
        """Now and then, for what is dear to compute."""

    def on_end(self, simulation: Simulation) -> None:
        """Check what must hold in the end. Called when the scenario is over."""
