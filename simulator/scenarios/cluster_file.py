"""A scenario's cluster from the file that ``millrace up --cluster`` starts: models, groups, services and policies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec
from millrace.actor.errors import ConfigError
from millrace.cluster.engine_limits import engine_parameters, step_time_of
from millrace.cluster.model_folders import with_model_folders
from millrace.cluster.reading import read_cluster
from millrace.cluster.spec import ClusterSpec, GroupSpec, ModelSpec
from millrace.cluster.workers import workers_of
from millrace.enginemodel.parameters import EngineParameters
from millrace.supervision.service_fields import STEP_TIMES, coordinator_fields, merged

from services.coordinator.config import CoordinatorConfig
from services.ingress.config import DispatchConfig
from simulator.scenarios.spec import PredictorSpec
from simulator.scenarios.trading_spec import TradingSpec

#: Engine and step-time set of a group, in place of what the file says.
EngineOf = Callable[[ModelSpec, GroupSpec], tuple[EngineParameters, str]]


def with_cluster_file(table: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The scenario's table with ``cluster.file`` replaced by what the file says; as it is where it names none.

    What the scenario says itself wins over the file.

    Args:
        folder: What a relative path is looked for in, after the working directory.

    Raises:
        ConfigError: the file is wrong, or has a cascade.
    """
    cluster = table.get("cluster")
    if not isinstance(cluster, dict) or "file" not in cluster:
        return table
    if "groups" in cluster:
        raise ConfigError("cluster.groups: not together with cluster.file, which has them")
    name = str(cluster["file"])
    path = next((place for place in (Path(name), folder / name) if place.is_file()), Path(name))
    tables = cluster_tables(with_model_folders(read_cluster(path)))
    if "policy" in table.get("dispatch", {}):
        del tables["dispatch"]  # parameters belong to their policy
    own = {key: value for key, value in cluster.items() if key != "file"}
    return merged(tables, {**table, "cluster": own})


def cluster_tables(spec: ClusterSpec, engine_of: EngineOf | None = None) -> dict[str, Any]:
    """The tables of a scenario on this cluster, whose models are folders.

    Args:
        engine_of: Of each group; None for what the file and the models say.

    Raises:
        ConfigError: a field is wrong, or it has a cascade.
    """
    if spec.cascade is not None:
        raise ConfigError("the cluster has a cascade, and simulated ones have none")
    told = merged(coordinator_fields(spec), spec.settings.coordinator)
    try:
        coordinator = msgspec.convert({k: v for k, v in told.items() if k != "recording"}, CoordinatorConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"settings.coordinator: {error}") from None
    names = [name for slot in workers_of(spec) for name in slot.instances]
    patterns = coordinator.roles.items()
    roles = {name: role for name in names for pattern, role in patterns if fnmatchcase(name, pattern)}
    trading, broker = spec.policies.trading, spec.settings.broker
    counts = {kind: getattr(spec.services, kind) for kind in ("ingresses", "coordinators")}
    predictor = {k: v for k, v in spec.settings.predictor.items() if k in PredictorSpec.__struct_fields__}
    moves = bool(roles or coordinator.stages.ranges or spec.kv_replicas.enabled)
    moves = moves or coordinator.stages.policy != "one_stage" or trading.name not in ("", "none")
    dispatch = spec.policies.dispatch
    return {
        "cluster": {
            **counts,
            "predictors": max(1, spec.services.predictors),
            "predictor": predictor,
            "groups": _groups(spec, engine_of or (lambda model, group: _engine(spec, model, group))),
        },
        "dispatch": {
            "policy": dispatch.name or DispatchConfig().policy,
            **({"parameters": dispatch.parameters} if dispatch.parameters else {}),
        },
        "stages": msgspec.to_builtins(coordinator.stages),
        "step_bounds": msgspec.to_builtins(coordinator.step_bounds),
        "roles": msgspec.to_builtins(coordinator.flips),
        "provisioning": {
            "strategy": coordinator.provisioning.strategy,
            "parameters": coordinator.provisioning.parameters,
        },
        "migration": {
            "on": moves and spec.services.migrators,
            "roles": {name: str(role) for name, role in roles.items()},
            "limits": spec.settings.migrator.get("limits", {}),
            "replicas": {"enabled": spec.kv_replicas.enabled, "tokens_min": spec.kv_replicas.tokens_min},
            "replica_share": spec.kv_replicas.memory_share,
        },
        "trading": {
            **{key: value for key, value in broker.items() if key in TradingSpec.__struct_fields__},
            "policy": trading.name or "none",
            "parameters": trading.parameters,
            **{key: value for key, value in broker.get("trading", {}).items() if key == "reasons"},
        },
    }


def _groups(spec: ClusterSpec, engine_of: EngineOf) -> list[dict[str, Any]]:
    """Groups of the scenario. One whose name was given before has its number in the file after it."""
    seen: Counter[str] = Counter()
    slots = workers_of(spec)
    found = []
    for index, (model, group) in enumerate((each, group) for each in spec.models for group in each.groups):
        seen[group.name] += 1
        members = [name for slot in slots if slot.group is group and not slot.spare for name in slot.instances]
        engine, step_time = engine_of(model, group)
        tensor = f"-tp{group.tensor_parallel}" if group.tensor_parallel > 1 else ""
        found.append(
            {
                "name": group.name if seen[group.name] == 1 else f"{group.name}{index}",
                "model": model.name,
                "instances": len(members),
                "members": members,
                "spares": group.spares,
                "step_time": step_time,
                "shape": f"{group.device}{tensor}",
                "engine": _as_table(engine),
            }
        )
    return found


def _engine(spec: ClusterSpec, model: ModelSpec, group: GroupSpec) -> tuple[EngineParameters, str]:
    step_time = step_time_of(spec, group) or STEP_TIMES.get(Path(model.path).name, "")
    if not step_time:
        raise ConfigError(f"cluster.file: group {group.name} of model {model.name} names no step_time")
    return engine_parameters(spec, model, group), step_time


def _as_table(parameters: EngineParameters) -> dict[str, Any]:
    """Return the parameters as a scenario's file has them."""
    return dict(msgspec.to_builtins(parameters))
