"""Runs a migrator: ``python -m services.migrator --config FILE``."""

from __future__ import annotations

import sys

from millrace.actor.hosting import host
from millrace.contracts.catalog import Role
from millrace.telemetry import Telemetry

from services.migrator.actor import ACCEPTS, MigratorActor
from services.migrator.config import MigratorConfig
from services.migrator.metrics import MigratorMetrics
from services.migrator.replay import migrator_rng


def build(config: MigratorConfig, incarnation: int, telemetry: Telemetry) -> MigratorActor:
    """Makes the actor of this process."""
    rng = migrator_rng(config.name, incarnation)
    metrics = MigratorMetrics(telemetry.registry)
    return MigratorActor(config=config, incarnation=incarnation, rng=rng, metrics=metrics)


if __name__ == "__main__":
    sys.exit(host(Role.MIGRATOR, MigratorConfig, ACCEPTS, build))
