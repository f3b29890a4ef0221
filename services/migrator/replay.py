"""Builds the actor of a recording again, for `millrace replay`."""

from __future__ import annotations

from random import Random

import msgspec

from services.migrator.actor import MigratorActor
from services.migrator.config import MigratorConfig
from services.migrator.metrics import MigratorMetrics


def migrator_rng(name: str, incarnation: int) -> Random:
    """The actor's source of names and span ids."""
    return Random(f"{name}-{incarnation}")


def replay_actor(config: str, seed: int) -> MigratorActor:
    """The actor as it was when the recording began; ``seed`` is its incarnation."""
    known = msgspec.json.decode(config, type=MigratorConfig)
    rng = migrator_rng(known.name, seed)
    return MigratorActor(config=known, incarnation=seed, rng=rng, metrics=MigratorMetrics())
