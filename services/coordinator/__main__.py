"""Runs a coordinator: ``python -m services.coordinator --config FILE``."""

from __future__ import annotations

import sys

from millrace.actor.hosting import host
from millrace.contracts.catalog import Role
from millrace.telemetry import Telemetry

from services.coordinator.actor import ACCEPTS, CoordinatorActor
from services.coordinator.config import CoordinatorConfig
from services.coordinator.metrics import CoordinatorCollector


def build(config: CoordinatorConfig, incarnation: int, telemetry: Telemetry) -> CoordinatorActor:
    """Makes the actor of this process."""
    actor = CoordinatorActor(
        name=config.name,
        cluster=config.bus.cluster,
        incarnation=incarnation,
        provisioning=config.provisioning,
        roles=config.roles,
    )
    telemetry.registry.register(CoordinatorCollector(actor.provisioning.figures))
    return actor


if __name__ == "__main__":
    sys.exit(host(Role.COORDINATOR, CoordinatorConfig, ACCEPTS, build))
