"""Checks settings and rendered configuration files with the services' own types, before any process is started."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from millrace.actor.config import load_config
from millrace.actor.config_marks import refuse_wired
from millrace.actor.errors import ConfigError
from millrace.actor.nearest_field import nearest_field
from millrace.cluster.model_folders import check_weights
from millrace.cluster.spec import ClusterSpec
from millrace.enginemodel.coefficients import load_step_time

from services.broker.config import BrokerConfig, trading_policy
from services.coordinator.config import CoordinatorConfig, provisioning_policy
from services.ingress.config import CascadeConfig, IngressConfig, dispatch_policy
from services.judge.config import JudgeConfig
from services.migrator.config import MigratorConfig
from services.page.config import PageConfig
from services.predictor.config import PredictorConfig
from services.tagger.config import TaggerConfig
from services.worker.config import EngineKind, WorkerConfig
from services.worker.modelled import ModelledConfig, modelled_parameters

#: Configuration of each service, by its name in ``settings``.
SERVICES: Mapping[str, type[msgspec.Struct]] = MappingProxyType(
    {
        "ingress": IngressConfig,
        "worker": WorkerConfig,
        "migrator": MigratorConfig,
        "broker": BrokerConfig,
        "predictor": PredictorConfig,
        "tagger": TaggerConfig,
        "coordinator": CoordinatorConfig,
        "judge": JudgeConfig,
    }
)

#: Values of vLLM's ``load_format`` by which it reads weights from the model's own folder.
FORMATS_OF_FOLDERS = frozenset({"auto", "fastsafetensors", "hf", "mistral", "npcache", "pt", "safetensors"})

#: Where a person sets what a deployment writes into the services' files: key of the cluster's file, by path.
SET_IN_CLUSTER: Mapping[str, str] = MappingProxyType(
    {
        "bus.cluster": "name",
        "bus.servers": "nats.port",
        "bus.tls": "nats.tls",
        "telemetry.log_format": "telemetry.log_format",
        "telemetry.otlp_endpoint": "telemetry.otlp",
        "telemetry.trace_sample": "telemetry.trace_sample",
        "telemetry.trace_first_per_s": "telemetry.trace_first_per_s",
        "telemetry.metrics_port": "telemetry.metrics_port",
        "ingress.http.host": "api.host",
        "ingress.http.port": "api.port",
        "ingress.http.keys_file": "api.keys",
        "ingress.models": "models",
        "ingress.cascades": "cascade",
        "ingress.dispatch.policy": "policies.dispatch.name",
        "ingress.dispatch.parameters": "policies.dispatch.parameters",
        "worker.model": "models",
        "worker.engine": "models.N.groups.N.engine",
        "worker.instances": "models.N.groups.N.count",
        "worker.tensor_parallel_size": "models.N.groups.N.tensor_parallel",
        "worker.shape": "models.N.groups.N.device",
        "worker.migration.replicas.memory_share": "kv_replicas.memory_share",
        "migrator.replicas.enabled": "kv_replicas.enabled",
        "migrator.replicas.tokens_min": "kv_replicas.tokens_min",
        "broker.trading.policy": "policies.trading.name",
        "broker.trading.parameters": "policies.trading.parameters",
        "predictor.shards": "services.predictors",
        "coordinator.provisioning.strategy": "policies.provisioning.name",
        "coordinator.provisioning.parameters": "policies.provisioning.parameters",
        "coordinator.provisioning.hosts": "models.N.groups.N.host",
        "coordinator.stages.policy": "policies.stages.name",
        "coordinator.stages.parameters": "policies.stages.parameters",
        "coordinator.stages.ranges": "models.N.stages",
        "coordinator.cascades": "cascade",
        "judge.judge": "cascade.judge",
        "judge.parameters": "cascade.parameters",
        "judge.url": "cascade.parameters.url",
        "judge.model": "cascade.parameters.model",
        "judge.key_file": "cascade.parameters.key_file",
        "judge.timeout_s": "cascade.parameters.timeout_s",
    }
)


def check_settings(spec: ClusterSpec) -> None:
    """Refuses settings of what follows from the rest of the cluster's file. Raises ConfigError naming the key."""
    told = spec.settings
    for service, kind in SERVICES.items():
        _refuse_wired(getattr(told, service), service, kind, f"settings.{service}")
    for name, settings in told.workers.items():
        _refuse_wired(settings, "worker", WorkerConfig, f"settings.workers.{name}")
    for index, model in enumerate(spec.models):
        for number, group in enumerate(model.groups):
            _refuse_wired(group.settings, "worker", WorkerConfig, f"models.{index}.groups.{number}.settings")
    if spec.cascade is not None:
        _refuse_wired(spec.cascade.settings, "cascade", CascadeConfig, "cascade.settings")


def _refuse_wired(settings: dict[str, Any], service: str, kind: type[msgspec.Struct], where: str) -> None:
    own = {key.removeprefix(f"{service}."): there for key, there in SET_IN_CLUSTER.items()}
    refuse_wired(settings, kind, instead=own, where=where)


def check_files(spec: ClusterSpec, files: Iterable[tuple[str, Path]]) -> None:
    """Refuses settings and configurations that their services would refuse.

    Args:
        spec: The cluster that was rendered.
        files: (role, file) of each process; roles without a configuration of their own are passed over.

    Raises:
        ConfigError: with the process's name, the key and the value.
    """
    check_settings(spec)
    for role, path in files:
        check = _CHECKS.get(role)
        if check is None:
            continue
        try:
            check(path)
        except ConfigError as error:
            raise ConfigError(f"{path.stem}: {str(error).removeprefix(f'{path}: ')}") from None


def _ingress(path: Path) -> None:
    dispatch_policy(load_config(IngressConfig, path).dispatch)


def _coordinator(path: Path) -> None:
    provisioning_policy(load_config(CoordinatorConfig, path).provisioning)


def _broker(path: Path) -> None:
    trading_policy(load_config(BrokerConfig, path).trading)


def _worker(path: Path) -> None:
    config = load_config(WorkerConfig, path)
    if config.engine is not EngineKind.MODELLED:
        try:
            _ = load_step_time(config.step_time) if config.step_time else None
        except ValueError as error:
            raise ConfigError(f"step_time: {error}") from None
        arguments = {"load_format": config.load_format, "model": config.model_path} | config.engine_args
        if arguments["load_format"] in FORMATS_OF_FOLDERS and (Path(arguments["model"]) / "config.json").is_file():
            check_weights(Path(arguments["model"]))
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
        "page": lambda path: load_config(PageConfig, path),
        "tagger": lambda path: load_config(TaggerConfig, path),
    }
)
