"""Builds the coordinator and its controllers, hosted as one actor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from millrace.actor.actor import Actor
from millrace.actor.deps import ActorDeps
from millrace.actor.group import ActorGroup
from millrace.contracts.coordinator import PlanProposed, SetInstances, SetRole
from millrace.contracts.message import Body
from millrace.contracts.observers import DecisionMade, RequestFinished
from millrace.contracts.status import InstanceSummary, ServicePresence
from millrace.enginemodel.step_time_models import StepTimeModel

from services.coordinator.actor import CoordinatorActor
from services.coordinator.autopilot import AutopilotActor
from services.coordinator.cascades import CascadesActor
from services.coordinator.config import CoordinatorConfig
from services.coordinator.instance_models import InstanceModels, read_step_times
from services.coordinator.metrics import AutopilotMetrics, ProvisioningMetrics
from services.coordinator.provisioning import ProvisioningActor
from services.coordinator.recorder import RecorderActor
from services.coordinator.roles import RolesActor
from services.coordinator.stages import StagesActor
from services.coordinator.step_bounds import StepBoundsActor

ACCEPTS: tuple[type[Body], ...] = (
    InstanceSummary,
    ServicePresence,
    DecisionMade,
    RequestFinished,
    PlanProposed,
    SetInstances,
    SetRole,
)


@dataclass(frozen=True, kw_only=True)
class CoordinatorDeps(ActorDeps):
    """Dependencies of a coordinator beside its configuration.

    Attributes:
        step_times: Step times by the name that instances give, beside those that ship and those of files.
    """

    step_times: Mapping[str, StepTimeModel] = field(default_factory=dict)


def build(config: CoordinatorConfig, deps: ActorDeps) -> ActorGroup:
    """The actors of a configuration; one without cascades knows nothing of them.

    Raises:
        ConfigError: a policy is wrong, or a file that the configuration names is.
    """
    extra = deps.step_times if isinstance(deps, CoordinatorDeps) else {}
    costs = InstanceModels(read_step_times(config.stages.step_times) | dict(extra))
    incarnation = deps.incarnation
    controllers: list[Actor] = [
        StagesActor(config, incarnation=incarnation, instance_model=costs.of),
        RolesActor(config, incarnation=incarnation),
        ProvisioningActor(config, incarnation=incarnation, metrics=ProvisioningMetrics(deps.registry)),
    ]
    if config.step_bounds.tpot_s:
        controllers.append(StepBoundsActor(config, incarnation=incarnation, instance_model=costs.of))
    if config.recording:
        controllers.append(RecorderActor(config, incarnation=incarnation))
    if config.recording and config.autopilot != "off":
        metrics = AutopilotMetrics(deps.registry)
        controllers.append(AutopilotActor(config, incarnation=incarnation, metrics=metrics))
    if config.cascades:
        controllers.append(CascadesActor(config, incarnation=incarnation))
    return ActorGroup(CoordinatorActor(config, incarnation=incarnation), *controllers)
