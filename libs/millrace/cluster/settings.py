"""Values that `--set PATH=VALUE` lays over a cluster's specification. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import msgspec

from millrace.actor.errors import ConfigError
from millrace.actor.nearest_field import nearest_field, nearest_name
from millrace.actor.settings import parsed, with_settings
from millrace.cluster.reading import plain
from millrace.cluster.spec import ClusterSpec, ServiceSettings
from millrace.cluster.workers import workers_of

#: Beginnings that are short for ``settings.``.
_SERVICES = tuple(name for name in ServiceSettings.__struct_fields__ if name != "workers")


def with_cluster_settings(spec: ClusterSpec, settings: Iterable[str]) -> ClusterSpec:
    """The cluster with each setting laid over it in turn, not checked.

    A path begins with a field of the cluster's file (``api.port=9000``, ``models.0.groups.0.role=prefill``), with a
    service for a field of its configuration (``worker.max_num_seqs=8``), or with a worker's name (``worker-1.seed=4``).

    Raises:
        ConfigError: naming the setting and the nearest right key.
    """
    settings = list(settings)
    workers = [slot.name for slot in workers_of(spec)] if settings else []
    table = with_settings(msgspec.to_builtins(spec), [_full(setting, workers) for setting in settings])
    try:
        return msgspec.convert(table, ClusterSpec)
    except msgspec.ValidationError as error:
        where = "--set: " if settings else ""
        raise ConfigError(f"{where}{plain(str(error))}{nearest_field(str(error), ClusterSpec)}") from None


def present_settings(spec: ClusterSpec, settings: Iterable[str]) -> list[str]:
    """The same keys with their present values, an absent text or table as empty; [] where no setting says it."""
    found = []
    for setting in settings:
        path, value = parsed(_full(setting, []))
        place: Any = msgspec.to_builtins(spec)
        for word in path:
            place = place.get(word) if isinstance(place, dict) else None
        place = type(value)() if place is None and isinstance(value, str | dict) else place
        text = json.dumps(place, separators=(",", ":"))
        if place is None or " " in text:
            return []
        found.append(f"{setting.partition('=')[0]}={text}")
    return found


def _full(setting: str, workers: list[str]) -> str:
    """The setting with a path from the root of the cluster's file."""
    path, value = parsed(setting)
    first = path[0]
    if first in ClusterSpec.__struct_fields__:
        return setting
    if first not in _SERVICES and first not in workers:
        known: list[Any] = [*_SERVICES, *ClusterSpec.__struct_fields__, *workers]
        raise ConfigError(f"--set {setting}: there is no {first}{nearest_name(first, known)}")
    if len(path) == 1 and not isinstance(value, dict):
        raise ConfigError(f"--set {setting}: {first} takes fields, such as {first}.KEY=VALUE")
    return f"settings.workers.{setting}" if first in workers else f"settings.{setting}"
