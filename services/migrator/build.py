"""Builds the migrator's actor."""

from __future__ import annotations

from millrace.actor.deps import ActorDeps

from services.migrator.actor import MigratorActor
from services.migrator.config import MigratorConfig
from services.migrator.metrics import MigratorMetrics


def build(config: MigratorConfig, deps: ActorDeps) -> MigratorActor:
    """The actor of a configuration."""
    metrics = MigratorMetrics(deps.registry)
    return MigratorActor(config=config, incarnation=deps.incarnation, rng=deps.rng, metrics=metrics)
