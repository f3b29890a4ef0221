"""Reads what planning needs of files, once, before the actor is built: step times."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from millrace.actor.errors import ConfigError
from millrace.enginemodel.coefficients import coefficient_names, load_step_time
from millrace.enginemodel.step_time_models import StepTimeModel

from services.coordinator.config import CoordinatorConfig
from services.coordinator.planning import Planning

NO_STEP_TIMES: Mapping[str, StepTimeModel] = MappingProxyType({})


def build_planning(config: CoordinatorConfig, step_times: Mapping[str, StepTimeModel] = NO_STEP_TIMES) -> Planning:
    """The planning of a configuration.

    Args:
        config: Stage policy and files.
        step_times: More of them, by the name that instances give.

    Raises:
        ConfigError: the stage policy or its parameters are wrong, or a file that it names is.
    """
    stages = config.stages
    return Planning(
        stages,
        name=config.name,
        step_times=read_step_times(stages.step_times) | dict(step_times),
    )


def read_step_times(files: Mapping[str, str]) -> dict[str, StepTimeModel]:
    """Sets that ship, and those of files, by the name that instances give in their records.

    Raises:
        ConfigError: a file cannot be read.
    """
    try:
        shipped: dict[str, StepTimeModel] = {name: load_step_time(name) for name in coefficient_names()}
        return shipped | {name: load_step_time(path) for name, path in files.items()}
    except ValueError as error:
        raise ConfigError(f"stages.step_times: {error}") from error
