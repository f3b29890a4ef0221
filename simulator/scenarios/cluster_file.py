"""A scenario's cluster from the file that ``millrace up --cluster`` starts: models, groups, services and dispatch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from millrace.actor.errors import ConfigError
from millrace.cluster import ClusterSpec, GroupSpec, ModelSpec, read_cluster
from millrace.cluster.engine_limits import engine_parameters, step_time_of
from millrace.cluster.model_folders import with_model_folders
from millrace.contracts.plan import InstanceRole
from millrace.enginemodel.parameters import EngineParameters
from millrace.supervision.service_fields import STEP_TIMES

#: Fields of a cluster's file that scenarios have a table of their own for.
SECTIONS = {
    "policies.stages": "stages",
    "policies.trading": "trading",
    "policies.provisioning": "provisioning",
}


def with_cluster_file(table: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The scenario's table with ``cluster.file`` replaced by what the file says; as it is where it names none.

    Counts of services and a dispatch policy in the scenario itself win over the file's.

    Args:
        folder: What a relative path is looked for in, after the working directory.

    Raises:
        ConfigError: the file is wrong, or says something that the scenario must say itself.
    """
    cluster = table.get("cluster")
    if not isinstance(cluster, dict) or "file" not in cluster:
        return table
    if "groups" in cluster:
        raise ConfigError("cluster.groups: not together with cluster.file, which has them")
    name = str(cluster["file"])
    path = next((place for place in (Path(name), folder / name) if place.is_file()), Path(name))
    spec = with_model_folders(read_cluster(path))
    _check(spec)
    counts = {kind: getattr(spec.services, kind) for kind in ("ingresses", "coordinators")}
    counts["predictors"] = max(1, spec.services.predictors)
    own = {key: value for key, value in cluster.items() if key != "file"}
    chosen = spec.policies.dispatch
    dispatch = {"policy": chosen.name, "parameters": chosen.parameters} if chosen.name else {}
    named = table.get("dispatch", {})
    return {
        **table,
        "cluster": {**counts, **own, "groups": _groups(spec)},
        "dispatch": named if "policy" in named else {**dispatch, **named},
    }


def _check(spec: ClusterSpec) -> None:
    """Refuses what would otherwise be left out in silence."""
    for field, section in SECTIONS.items():
        if getattr(spec.policies, field.rpartition(".")[2]).name:
            raise ConfigError(f"cluster.file: {field} is not read from it; say it in the scenario's [{section}]")
    if any(model.stages for model in spec.models):
        raise ConfigError("cluster.file: models[].stages are not read from it; say them in the scenario's [stages]")
    if spec.kv_replicas.enabled:
        raise ConfigError("cluster.file: kv_replicas is not read from it; say it in [migration], replicas")
    if spec.cascade is not None:
        raise ConfigError("cluster.file: it has a cascade, and scenarios have none")
    if any(group.role is not InstanceRole.BOTH for model in spec.models for group in model.groups):
        raise ConfigError("cluster.file: models[].groups[].role is not read from it; say it in [migration], roles")


def _groups(spec: ClusterSpec) -> list[dict[str, Any]]:
    """Groups of the scenario. One whose name was given before has its number in the file after it."""
    groups = [(model, group) for model in spec.models for group in model.groups]
    seen: Counter[str] = Counter()
    found = []
    for index, (model, group) in enumerate(groups):
        seen[group.name] += 1
        name = group.name if seen[group.name] == 1 else f"{group.name}{index}"
        found.append(_group(spec, model, group) | {"name": name})
    return found


def _group(spec: ClusterSpec, model: ModelSpec, group: GroupSpec) -> dict[str, Any]:
    step_time = step_time_of(spec, group) or STEP_TIMES.get(Path(model.path).name, "")
    if not step_time:
        raise ConfigError(f"cluster.file: group {group.name} of model {model.name} names no step_time")
    tensor = f"-tp{group.tensor_parallel}" if group.tensor_parallel > 1 else ""
    return {
        "model": model.name,
        "instances": group.size,
        "spares": group.spares,
        "step_time": step_time,
        "shape": f"{group.device}{tensor}",
        "engine": _as_table(engine_parameters(spec, model, group)),
    }


def _as_table(parameters: EngineParameters) -> dict[str, Any]:
    """Return the parameters as a scenario's file has them."""
    return dict(msgspec.to_builtins(parameters))
