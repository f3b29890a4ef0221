"""Changes of a cluster that a question asks for, and the part of a cluster's file that each of them is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from millrace.actor.errors import ConfigError
from millrace.cluster.checks import check_spec
from millrace.cluster.model_folders import with_model_folders
from millrace.cluster.reading import parse_cluster, read_cluster
from millrace.cluster.settings import with_cluster_settings
from millrace.cluster.spec import ClusterSpec, PolicyChoice
from millrace.policies.registry import policy_name
from millrace.workloads.recording import RecordedLoad

from services.ingress.config import DispatchConfig

#: Fields that two clusters may differ in without a difference to a replay.
_NOT_REPLAYED = frozenset({"name", "api", "nats", "telemetry", "extra_services"})


class AskedChange(msgspec.Struct, frozen=True, kw_only=True):
    """One changed cluster, and how it was asked for; ``settings`` where that was by such."""

    label: str
    spec: ClusterSpec
    settings: list[str] = []


def with_setting(spec: ClusterSpec, text: str) -> AskedChange:
    """Keys that change together: ``KEY=VALUE`` once or more, with blanks in between.

    Raises:
        ConfigError: naming the key.
    """
    settings = text.split()
    spec = with_model_folders(with_cluster_settings(spec, settings))
    check_spec(spec)
    return AskedChange(label=text, spec=spec, settings=settings)


def with_instances(spec: ClusterSpec, count: int) -> AskedChange:
    """So many instances in all. Groups keep their order; the last one that has any is changed first.

    Raises:
        ConfigError: fewer than models, or groups whose instances have names of their own.
    """
    sizes = [group.size for model in spec.models for group in model.groups]
    least = [int(index == 0) for model in spec.models for index, _ in enumerate(model.groups)]
    if count < sum(least):
        raise ConfigError(f"--instances {count}: at least one for each model, {sum(least)}")
    if any(group.names for model in spec.models for group in model.groups):
        raise ConfigError("--instances: the cluster's file names its instances one by one; ask with --cluster")
    sizes[-1] += max(0, count - sum(sizes))
    for place in reversed(range(len(sizes))):
        sizes[place] = max(least[place], sizes[place] - max(0, sum(sizes) - count))
    left = iter(sizes)
    models = [
        msgspec.structs.replace(
            model, groups=[msgspec.structs.replace(group, count=next(left)) for group in model.groups]
        )
        for model in spec.models
    ]
    return AskedChange(label=f"{count} instances", spec=msgspec.structs.replace(spec, models=models))


def with_file(path: Path) -> AskedChange:
    """Another cluster's file. Raises ConfigError where that is wrong."""
    return AskedChange(label=path.name, spec=with_model_folders(read_cluster(path)))


def fragment(before: ClusterSpec, change: AskedChange) -> str:
    """Keys of the changed cluster's file that differ, each in a line as ``--set`` takes it, and as it was asked for."""
    found = [
        f"{'.'.join(path)}={msgspec.json.encode(value).decode()}"
        for path, value in _differences(before, change.spec, ())
        if path[0] not in _NOT_REPLAYED
    ]
    return "\n".join(change.settings or found) if found else ""


def _differences(before: Any, after: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(after, msgspec.Struct) and type(before) is type(after):
        for field in after.__struct_fields__:
            yield from _differences(getattr(before, field), getattr(after, field), (*path, field))
    elif isinstance(after, dict):
        known = before if isinstance(before, dict) else {}
        for key in {**known, **after}:
            yield from _differences(known.get(key), after.get(key), (*path, key))
    elif _tables(after) and _tables(before) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from _differences(one, other, (*path, str(index)))
    elif before != after and after is not None:
        yield path, after


def _tables(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, msgspec.Struct) for value in values)


def recorded_cluster(load: RecordedLoad) -> ClusterSpec:
    """The cluster that a load was recorded on, as it was at the end: with the dispatch policy that placed the last
    request.

    Raises:
        ConfigError: its file is wrong, or its models are not here.
    """
    spec = with_model_folders(parse_cluster(load.began.cluster))
    policy = next((row.policy for _, row in reversed(load.requests) if row.policy), "")
    chosen = spec.policies.dispatch
    if not policy or policy == policy_name(chosen.name or DispatchConfig().policy):
        return spec
    dispatch = PolicyChoice(name=policy)
    return msgspec.structs.replace(spec, policies=msgspec.structs.replace(spec.policies, dispatch=dispatch))
