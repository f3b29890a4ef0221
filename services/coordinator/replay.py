"""Builds the actor of a recording again, for `millrace replay`."""

from __future__ import annotations

import msgspec

from services.coordinator.actor import CoordinatorActor
from services.coordinator.config import CoordinatorConfig


def replay_actor(config: str, seed: int) -> CoordinatorActor:
    """The actor as it was when the recording began; ``seed`` is its incarnation."""
    known = msgspec.json.decode(config, type=CoordinatorConfig)
    return CoordinatorActor(
        name=known.name,
        cluster=known.bus.cluster,
        incarnation=seed,
        provisioning=known.provisioning,
        roles=known.roles,
    )
