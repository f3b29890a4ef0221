"""The interface between executing migrations and deciding which to start.

The migrator executes: slots, handshakes, leases, epochs. It starts a migration when a ``MigrateSequence`` orders it,
from a broker, an operator or a test, with a named or an open target. What leaves an instance without such an order is
decided by an ``Initiator``. The one built in (evacuation.py) serves clusters without brokers and instances whose broker
is silent.
"""

from __future__ import annotations

from typing import Protocol

from millrace.actor.effects import Effect
from millrace.contracts.migration import EvacuateInstance, MigrationFinished
from millrace.contracts.status import StatusSnapshot

from services.migrator.state import ManagedInstance


class Initiator(Protocol):
    """Starts migrations that nobody ordered by name. Each call returns effects."""

    def subscriptions(self, managed: ManagedInstance, now_ns: int) -> list[Effect]:
        """Subscribe to the snapshots and summaries that it needs. Called once a second and when a plan changes."""
        ...

    def on_snapshot(self, managed: ManagedInstance, body: StatusSnapshot, now_ns: int) -> list[Effect]:
        """The instance's sequences now."""
        ...

    def evacuate(self, managed: ManagedInstance, body: EvacuateInstance, reply_to: str, now_ns: int) -> list[Effect]:
        """Everything shall leave the instance; answered with InstanceEvacuated when it is over."""
        ...

    def ordered(self, managed: ManagedInstance, now_ns: int) -> None:
        """A broker ordered a move away from the instance."""
        ...

    def on_finished(self, managed: ManagedInstance, body: MigrationFinished, now_ns: int) -> list[Effect]:
        """A migration away from the instance ended, whoever ordered it."""
        ...

    def resume(self, managed: ManagedInstance, now_ns: int) -> list[Effect]:
        """A slot is free, or a timer fired: start what may start."""
        ...

    def abandon(self, managed: ManagedInstance, now_ns: int) -> list[Effect]:
        """This process ends: answer who waits."""
        ...
