"""Which workers could run here, and which orders to start one were carried out: what provisioning may ask for."""

from __future__ import annotations

from collections.abc import Container, Iterable

from millrace.contracts.catalog import Role

from services.supervisor.config import ChildSpec

#: Orders remembered, so that a repeated one starts nothing. A coordinator repeats within seconds, and once.
ORDERS_MAX = 256


class Roster:
    """The workers of one machine, those that run and those that could.

    Attributes:
        host: Name under which the machine is asked.
        model: What its workers serve; empty takes any.
    """

    def __init__(self, *, host: str, model: str, workers: Iterable[ChildSpec]) -> None:
        self.host = host
        self.model = model
        self._workers = [spec for spec in workers if spec.role == Role.WORKER]
        self._orders: dict[str, str] = {}

    def free(self, running: Container[str]) -> ChildSpec | None:
        """The first worker whose name is not in use; None where all are."""
        return next((spec for spec in self._workers if spec.name not in running), None)

    @property
    def instances_max(self) -> int:
        """Instances that can run here at once."""
        return sum(len(spec.presences) for spec in self._workers)

    def instance_of(self, order: str) -> str | None:
        """The instance that an order gave; None where it is new."""
        return self._orders.get(order)

    def carried_out(self, order: str, instance: str) -> None:
        """Remembers an order; the oldest is forgotten at the bound."""
        if len(self._orders) >= ORDERS_MAX:
            del self._orders[next(iter(self._orders))]
        self._orders[order] = instance
