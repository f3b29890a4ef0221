"""Workers that can run here, and the start orders that were carried out: what provisioning may ask for."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from millrace.contracts.catalog import Role

from services.supervisor.config import ChildSpec

#: Orders remembered, so that a repeated one starts nothing. A coordinator repeats within seconds, and once.
ORDERS_MAX = 256


class Roster:
    """The workers of one machine, those that run and those that could.

    Attributes:
        host: Name under which the machine is asked.
        models: What its workers serve; empty where they serve any.
    """

    def __init__(self, *, host: str, workers: Iterable[ChildSpec], devices: Mapping[str, int] | None = None) -> None:
        self.host = host
        self._orders: dict[str, str] = {}
        self.replace(workers, devices or {})

    def replace(self, workers: Iterable[ChildSpec], devices: Mapping[str, int]) -> None:
        """Takes other workers. ``devices``: by kind, shared by them."""
        self._devices = dict(devices)
        self._workers = [spec for spec in workers if spec.role == Role.WORKER]
        self.models = {spec.model for spec in self._workers} - {""}

    def free(self, taken: Container[str], *, model: str, shape: str = "") -> ChildSpec | None:
        """The first worker of a model, and of a shape where one is asked for, whose name is not taken; None where all
        are.
        """
        fitting = (spec for spec in self._fitting(model) if shape in ("", spec.shape))
        return next((spec for spec in fitting if spec.name not in taken), None)

    def shapes(self, model: str) -> list[str]:
        """Shapes of a model's workers here, those that are known."""
        return sorted({spec.shape for spec in self._fitting(model)} - {""})

    def worker_of(self, instance: str) -> ChildSpec | None:
        """The worker that hosts an instance; None where it is not one of this machine."""
        return next((spec for spec in self._workers if instance in spec.presences), None)

    def instances_max(self, model: str, shape: str = "") -> int:
        """Instances of a model, and of a shape where one is named, that can run here at once."""
        return sum(len(spec.presences) for spec in self._fitting(model) if shape in ("", spec.shape))

    def lacks(self, spec: ChildSpec, running: Iterable[ChildSpec]) -> str:
        """Return the reason why a worker has no device beside those that run; empty where it has one."""
        if spec.device not in self._devices:
            return ""
        total = self._devices[spec.device]
        taken = sum(other.devices for other in running if other.device == spec.device)
        if taken + spec.devices <= total:
            return ""
        return f"{spec.name} needs {spec.devices} {spec.device}, {taken} of {total} are taken"

    def _fitting(self, model: str) -> list[ChildSpec]:
        return [spec for spec in self._workers if spec.model in ("", model)]

    def instance_of(self, order: str) -> str | None:
        """The instance that an order gave; None where it is new."""
        return self._orders.get(order)

    def carried_out(self, order: str, instance: str) -> None:
        """Remembers an order; the oldest is forgotten at the bound."""
        if len(self._orders) >= ORDERS_MAX:
            del self._orders[next(iter(self._orders))]
        self._orders[order] = instance
