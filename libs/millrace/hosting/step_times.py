"""Dependencies of services that forecast: step times by the name that instances give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from millrace.actor.deps import ActorDeps
from millrace.enginemodel.registered import load_step_times
from millrace.enginemodel.step_time_models import StepTimeModel
from millrace.telemetry import Telemetry


class _NamesFiles(Protocol):
    @property
    def step_times(self) -> Mapping[str, str]: ...


@dataclass(frozen=True, kw_only=True)
class StepTimeDeps(ActorDeps):
    """Dependencies of a service beside its configuration.

    Attributes:
        step_times: Step-time models by the name that instances give in their record.
    """

    step_times: Mapping[str, StepTimeModel]


def with_step_times(config: _NamesFiles, deps: ActorDeps, telemetry: Telemetry) -> StepTimeDeps:
    """Reads the sets that ship, and those of the configuration's files. One that cannot be read is left out."""
    step_times, unreadable = load_step_times(config.step_times)
    for name, error in unreadable.items():
        telemetry.logger.error("step_time_unreadable", step_time=name, error=error)
    telemetry.logger.info("forecasting", step_times=sorted(step_times))
    return StepTimeDeps(**vars(deps), step_times=step_times)
