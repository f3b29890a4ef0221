"""The ``[provisioning]`` table of a scenario."""

from __future__ import annotations

from typing import Any

import msgspec
from millrace.actor.errors import ConfigError
from millrace.contracts.bounds import Wait

from services.coordinator.config import ProvisioningConfig, provisioning_policy


class ProvisioningSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Provisioning settings of a scenario.

    Attributes:
        strategy: A name of ``PROVISIONING_POLICIES``.
        parameters: Its parameters; ``instances_max`` says how many spare instances there are.
        cold_start_s: From the order to an instance's first word, seconds.
        drain_limit_s: How long requests may go on at an instance that is to stop, seconds.
    """

    strategy: str = "none"
    parameters: dict[str, Any] = {}
    cold_start_s: Wait = 30.0
    drain_limit_s: Wait = 30.0

    @property
    def on(self) -> bool:
        return self.strategy != "none"

    def config(self) -> ProvisioningConfig:
        """For the coordinators. Waits are as long as this cold start needs."""
        return ProvisioningConfig(
            strategy=self.strategy,
            parameters=self.parameters,
            start_limit_s=2 * self.cold_start_s + 10,
            drain_limit_s=self.drain_limit_s,
        )

    def complaint(self) -> str:
        """Return the first error, with its name; empty if there is none."""
        try:
            provisioning_policy(self.config())
        except ConfigError as error:
            return str(error)
        return ""

    def spares(self, running: int) -> int:
        """Instances that may be added to those that run.

        Raises:
            ConfigError: no such strategy or parameters.
        """
        return max(0, getattr(provisioning_policy(self.config())[1], "instances_max", running) - running)
