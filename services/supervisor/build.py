"""Builds the supervisor's actor."""

from __future__ import annotations

from millrace.actor.deps import ActorDeps

from services.supervisor.actor import SupervisorActor
from services.supervisor.config import SupervisorConfig
from services.supervisor.roster import Roster


def build(config: SupervisorConfig, deps: ActorDeps) -> SupervisorActor:
    """The actor of a machine."""
    return SupervisorActor(
        name=config.name,
        cluster=config.bus.cluster,
        incarnation=deps.incarnation,
        children=[*config.nats, *config.children],
        roster=Roster(host=config.host, workers=[*config.children, *config.spares], devices=config.devices),
        spares=config.spares if config.provisioned else [],
        leaves=config.leaves,
    )
