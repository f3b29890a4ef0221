"""Builds the supervisor's actor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from millrace.actor.deps import ActorDeps

from services.supervisor.actor import SupervisorActor
from services.supervisor.config import ChildSpec
from services.supervisor.roster import Roster


@dataclass(frozen=True, kw_only=True)
class SupervisedMachine:
    """Machine that a supervisor's actor manages.

    Attributes:
        name: Of the supervisor on the bus.
        host: Name under which provisioning reaches the machine.
        children: Processes to keep running.
        spares: Workers that are not started at first.
        provisioned: Whether a policy starts and stops them.
        leaves: Whether workers drain before anything stops.
        model: Served by workers that name none.
        devices: By kind, shared by the workers.
    """

    name: str
    cluster: str
    host: str
    children: Sequence[ChildSpec]
    spares: Sequence[ChildSpec] = ()
    provisioned: bool = False
    leaves: bool = False
    model: str = ""
    devices: Mapping[str, int] = field(default_factory=dict)


def build(config: SupervisedMachine, deps: ActorDeps) -> SupervisorActor:
    """The actor of a machine."""
    return SupervisorActor(
        name=config.name,
        cluster=config.cluster,
        incarnation=deps.incarnation,
        children=list(config.children),
        roster=Roster(
            host=config.host,
            workers=[*config.children, *config.spares],
            model=config.model,
            devices=config.devices,
        ),
        spares=list(config.spares) if config.provisioned else [],
        leaves=config.leaves,
    )
