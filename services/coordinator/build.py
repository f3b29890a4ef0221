"""Builds the coordinator's actor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from millrace.actor.actor import Actor
from millrace.actor.deps import ActorDeps
from millrace.actor.group import ActorGroup
from millrace.enginemodel.step_time_models import StepTimeModel

from services.coordinator.actor import CoordinatorActor
from services.coordinator.config import CoordinatorConfig
from services.coordinator.files import build_planning
from services.coordinator.metrics import CoordinatorCollector
from services.coordinator.roles import Roles


@dataclass(frozen=True, kw_only=True)
class CoordinatorDeps(ActorDeps):
    """Dependencies of a coordinator beside its configuration.

    Attributes:
        step_times: Step times by the name that instances give, beside those that ship and those of files.
    """

    step_times: Mapping[str, StepTimeModel] = field(default_factory=dict)


def build(config: CoordinatorConfig, deps: ActorDeps) -> Actor:
    """The actor of a configuration; one without cascades knows nothing of them.

    Raises:
        ConfigError: the provisioning strategy or the stage policy is wrong, or a file that one of them names is.
    """
    extra = deps.step_times if isinstance(deps, CoordinatorDeps) else {}
    planning = build_planning(config, extra)
    actor = CoordinatorActor(
        config,
        incarnation=deps.incarnation,
        planning=planning,
        roles=Roles(config.flips, configured=config.roles, instance_model=planning.instance_model),
    )
    if deps.registry is not None:
        deps.registry.register(CoordinatorCollector(actor.provisioning.figures))
    if not config.cascades:
        return actor
    # It brings scipy: a second of start-up that a cluster without cascades does not need.
    from services.coordinator.cascades import CascadesActor

    return ActorGroup(actor, CascadesActor(config, incarnation=deps.incarnation))
