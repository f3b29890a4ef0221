"""Checks rendered configuration files with their services' own types, before any process is started."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec
from millrace.actor.config import load_config
from millrace.actor.errors import ConfigError
from millrace.actor.nearest_field import nearest_field
from millrace.enginemodel.coefficients import load_step_time

from services.broker.config import BrokerConfig, trading_policy
from services.coordinator.config import CoordinatorConfig, provisioning_policy
from services.ingress.config import IngressConfig, policy_of, policy_parameters
from services.judge.config import JudgeConfig
from services.migrator.config import MigratorConfig
from services.predictor.config import PredictorConfig
from services.tagger.config import TaggerConfig
from services.worker.config import EngineKind, WorkerConfig
from services.worker.modelled import ModelledConfig, modelled_parameters


def check_files(files: Iterable[tuple[str, Path]]) -> None:
    """Refuses configurations that their services would refuse.

    Args:
        files: (role, file) of each process; roles without a configuration of their own are passed over.

    Raises:
        ConfigError: with the process's name, the key and the value.
    """
    for role, path in files:
        check = _CHECKS.get(role)
        if check is None:
            continue
        try:
            check(path)
        except ConfigError as error:
            raise ConfigError(f"{path.stem}: {str(error).removeprefix(f'{path}: ')}") from None


def _ingress(path: Path) -> None:
    dispatch = load_config(IngressConfig, path).dispatch
    policy_parameters(dispatch, policy_of(dispatch))


def _coordinator(path: Path) -> None:
    provisioning_policy(load_config(CoordinatorConfig, path).provisioning)


def _broker(path: Path) -> None:
    trading_policy(load_config(BrokerConfig, path).trading)


def _worker(path: Path) -> None:
    config = load_config(WorkerConfig, path)
    if config.engine is not EngineKind.MODELLED:
        return
    try:
        modelled_parameters(config)
        load_step_time(msgspec.convert(config.modelled, ModelledConfig).coefficients)
    except (msgspec.ValidationError, ValueError, KeyError, OSError) as error:
        raise ConfigError(f"modelled: {error}{nearest_field(str(error), ModelledConfig)}") from None


_CHECKS: Mapping[str, Callable[[Path], object]] = MappingProxyType(
    {
        "ingress": _ingress,
        "coordinator": _coordinator,
        "broker": _broker,
        "migrator": lambda path: load_config(MigratorConfig, path),
        "worker": _worker,
        "predictor": lambda path: load_config(PredictorConfig, path),
        "judge": lambda path: load_config(JudgeConfig, path),
        "tagger": lambda path: load_config(TaggerConfig, path),
    }
)
