"""The ``[[orders]]`` table of a scenario: what an operator asks the coordinator for."""

from __future__ import annotations

from typing import Annotated

import msgspec
from millrace.contracts.coordinator import SetInstances, SetRole
from millrace.contracts.plan import InstanceRole


class OrderSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One order: a role of an instance, or a number of instances.

    Attributes:
        at_s: When, counted from the first possible arrival.
        instance: Whose role is ordered; empty for an order about numbers.
        role: The role; of an order about numbers, that of the instances that are meant, None for all.
        count: Instances that shall serve.
        shape: Of the instances that are meant; empty for all.
        model: Of an order about numbers; empty for the first group's.
        wait: Whether an order of a role may wait.
    """

    at_s: Annotated[float, msgspec.Meta(ge=0)]
    instance: str = ""
    role: InstanceRole | None = None
    count: int | None = None
    shape: str = ""
    model: str = ""
    wait: bool = True

    def __post_init__(self) -> None:
        """Raises ValueError where it is neither or both."""
        if bool(self.instance) == (self.count is not None):
            raise ValueError("an order has an instance and a role, or a count")
        if self.instance and self.role is None:
            raise ValueError(f"the order for {self.instance} has no role")

    def body(self, model: str) -> SetRole | SetInstances:
        """The message. ``model``: where the order names none."""
        model = self.model or model
        if self.count is not None:
            return SetInstances(model=model, count=self.count, shape=self.shape, role=self.role)
        assert self.role is not None, "checked at construction"
        return SetRole(model=model, instance=self.instance, role=self.role, wait=self.wait)
