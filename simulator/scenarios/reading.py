"""Reads a scenario file, with values set from the command line laid over it."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from millrace.actor.errors import ConfigError
from millrace.actor.nearest_field import nearest_field
from millrace.actor.settings import with_settings
from millrace.policies.dispatch import DISPATCH_POLICIES
from millrace.policies.registry import located
from millrace.workloads.arrivals import FromTrace

from services.coordinator.config import provisioning_policy
from simulator.scenarios.cluster import cluster_of
from simulator.scenarios.cluster_file import with_cluster_file
from simulator.scenarios.spec import ScenarioSpec

#: Beginning of a setting that names a cluster's file.
_FILE = "cluster.file="


class ScenarioError(ValueError):
    """A scenario is wrong. The message names the file and the key."""


def read_scenario(path: Path, settings: Iterable[str] = ()) -> ScenarioSpec:
    """Reads ``path`` and lays ``key.of.a.table=value`` settings over it; values are TOML, else plain strings.

    ``cluster.file`` is read before any other setting is laid over what it says.

    Raises:
        ScenarioError: the file cannot be read, or something in it or in a setting is wrong.
    """
    settings = list(settings)
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise ScenarioError(f"{path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ScenarioError(f"{path}: {error}") from None
    files = [setting for setting in settings if setting.startswith(_FILE)]
    if files and isinstance(table.get("cluster"), dict):
        table["cluster"].pop("groups", None)  # the file that was asked for has others
    try:
        table = with_cluster_file(with_settings(table, files), path.parent)
        table = with_settings(table, [setting for setting in settings if not setting.startswith(_FILE)])
    except ConfigError as error:
        raise ScenarioError(f"{path}: {error}") from None
    return scenario_of(_located(table, path.parent), source=str(path))


#: Tables whose ``policy`` (of provisioning ``strategy``) may be a file.
_SLOTS, _KEYS = ("dispatch", "stages", "trading", "roles", "provisioning"), ("policy", "strategy")


def _located(table: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The same with the paths of policies' files made absolute: runs may be made by other processes."""
    for choice, key in ((table, "extension"), *((table.get(slot), key) for slot in _SLOTS for key in _KEYS)):
        if isinstance(choice, dict) and isinstance(choice.get(key), str):
            choice[key] = located(choice[key], folder)
    return table


def scenario_of(table: dict[str, Any], *, source: str = "scenario") -> ScenarioSpec:
    """The scenario that a table says.

    Raises:
        ScenarioError: naming the wrong key.
    """
    try:
        spec = msgspec.convert(table, ScenarioSpec)
    except msgspec.ValidationError as error:
        raise ScenarioError(f"{source}: {error}{nearest_field(str(error), ScenarioSpec)}") from None
    complaint = _complaint(spec)
    if complaint:
        raise ScenarioError(f"{source}: {complaint}")
    return spec


def _complaint(spec: ScenarioSpec) -> str:
    """Return the first error that no single field's check can find; empty if there is none."""
    try:
        DISPATCH_POLICIES.choose(spec.dispatch.policy, spec.dispatch.parameters, table="dispatch.")
        cluster_of(spec)
        provisioning_policy(spec.provisioning)
    except ConfigError as error:
        return str(error)
    names = [group.name for group in spec.cluster.groups]
    bounds = {
        "cluster.groups: at least one is needed": bool(names),
        "cluster.groups: each needs a name of its own, of letters, digits, - and _": (
            len(set(names)) == len(names) and all(name.replace("-", "").replace("_", "").isalnum() for name in names)
        ),
        "workload.models: each must be the model of a group": all(
            model in spec.models() for model in spec.workload.models
        ),
        "workload.models: one share at least must be above 0": any(load.share for load in spec.models().values()),
        "workload.residents: must be 0 to less than workload.count, and 0 with a trace's own times": (
            spec.workload.residents < spec.workload.count
            and not (spec.workload.residents and isinstance(spec.workload.arrivals, FromTrace))
        ),
        "workload.warm_up: must be 0 to less than workload.count": spec.workload.warm_up < spec.workload.count,
    }
    complaint = next((complaint for complaint, holds in bounds.items() if not holds), "")
    return complaint or spec.migration.complaint(spec.instances())
