"""Reads what planning needs of files, once, before the actor is built: step times and coefficients of equation 1."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from millrace.actor.errors import ConfigError
from millrace.enginemodel.coefficients import coefficient_names, load_step_time
from millrace.enginemodel.step_time_models import StepTimeModel
from millrace.policies.stages.quality import QualityFile, QualityModel, decode_quality

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
        qualities=read_qualities(stages.qualities),
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


def read_qualities(files: Mapping[str, str]) -> dict[str, QualityModel]:
    """Coefficients by model.

    Args:
        files: Model -> path of a file that ``millrace profile --qoe`` wrote.

    Raises:
        ConfigError: a file cannot be read, or is of another model.
    """
    found: dict[str, QualityModel] = {}
    for model, path in files.items():
        read = _read(model, path)
        if read.model != model:
            raise ConfigError(f"stages.qualities.{model}: {path} is of another model, {read.model}")
        found[model] = read.coefficients
    return found


def _read(model: str, path: str) -> QualityFile:
    try:
        return decode_quality(Path(path).read_bytes(), origin=path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"stages.qualities.{model}: {error}") from error
