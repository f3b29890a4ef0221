"""Builds the coordinator's actor."""

from __future__ import annotations

from millrace.actor.actor import Actor
from millrace.actor.deps import ActorDeps

from services.coordinator.actor import CoordinatorActor
from services.coordinator.cascades import Cascades
from services.coordinator.cascading import CascadingCoordinator
from services.coordinator.config import CoordinatorConfig
from services.coordinator.files import build_planning
from services.coordinator.metrics import CoordinatorCollector


def build(config: CoordinatorConfig, deps: ActorDeps) -> Actor:
    """The actor of a configuration; one without cascades knows nothing of them.

    Raises:
        ConfigError: the provisioning strategy or the stage policy is wrong, or a file that one of them names is.
    """
    actor = CoordinatorActor(
        name=config.name,
        cluster=config.bus.cluster,
        incarnation=deps.incarnation,
        provisioning=config.provisioning,
        planning=build_planning(config),
    )
    if deps.registry is not None:
        deps.registry.register(CoordinatorCollector(actor.provisioning.figures))
    if not config.cascades:
        return actor
    cascades = Cascades(config.cascades, name=config.name, incarnation=deps.incarnation)
    return CascadingCoordinator(actor, cascades, cluster=config.bus.cluster)
