"""Validation of a specification before anything of it is started. Pure but for files of policies and step times."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec

from millrace.actor.errors import ConfigError
from millrace.cluster.cascade_checks import check_cascade
from millrace.cluster.spec import ClusterSpec, EngineName, ExtraService, GroupSpec, ModelSpec, PolicyChoice, StageSpec
from millrace.cluster.workers import instances_of, workers_of
from millrace.contracts.channels import Role
from millrace.enginemodel.coefficients import load_step_time
from millrace.policies.dispatch import DISPATCH_POLICIES
from millrace.policies.provisioning import PROVISIONING_POLICIES
from millrace.policies.registry import Registry
from millrace.policies.stages import STAGE_POLICIES
from millrace.policies.trading import TRADING_POLICIES

#: Policies that the services take where none is named.
DEFAULTS = {"dispatch": "forecast", "stages": "one_stage", "trading": "none", "provisioning": "none"}

#: Instances that one cluster is asked to run at most.
INSTANCES_MAX = 2_000


def check_spec(spec: ClusterSpec) -> None:
    """Refuses a cluster that cannot be.

    Raises:
        ConfigError: beginning with the field, such as ``models[0].stages[1].length_min``.
    """
    _check_names("name", [spec.name])
    if not spec.models:
        raise ConfigError("models: at least one is needed")
    for index, model in enumerate(spec.models):
        for where, name in [("name", model.name), *(("adapters", name) for name in model.adapters)]:
            if not name or not name.isprintable() or " " in name:
                raise ConfigError(f"models[{index}].{where} {name!r}: a served name has no white space")
    _check_once("models[].name", [model.name for model in spec.models])
    _check_once("models[].adapters", [name for model in spec.models for name in (model.name, *model.adapters)])
    for index, model in enumerate(spec.models):
        for number, group in enumerate(model.groups):
            _check_group(f"models[{index}].groups[{number}]", group)
            _check_step_times(spec, f"models[{index}].groups[{number}]", model, group)
    workers = workers_of(spec)
    _check_names("models[].groups[].names", [name for slot in workers for name in {slot.name, *slot.instances}])
    for index, model in enumerate(spec.models):
        _check_model(f"models[{index}]", model, instances_of(spec, model))
    _check_settings(spec, [slot.name for slot in workers])
    _check_extra_services(spec.extra_services, {name for slot in workers for name in {slot.name, *slot.instances}})
    _check_policies(spec)
    _check_replicas(spec)
    _check_devices(spec)
    if not re.match(r"$|https?://[^\s/]", spec.telemetry.otlp):
        raise ConfigError(f"telemetry.otlp: {spec.telemetry.otlp!r} is no URL, such as http://127.0.0.1:4318")
    try:
        json.dumps(msgspec.to_builtins(spec), allow_nan=False)
    except ValueError:
        raise ConfigError("inf and nan are no numbers of a cluster's file") from None
    if spec.cascade is not None:
        check_cascade(spec.cascade, [model.name for model in spec.models])


def _check_names(where: str, names: list[str]) -> None:
    """They are tokens of NATS subjects, and parts of file names."""
    for name in names:
        if not name or any(c.isspace() or c in "*>/\\" for c in name) or not name.isprintable():
            raise ConfigError(f"{where} {name!r}: a name has no white space, '*', '>' or '/'")
    _check_once(where, names)


def _check_once(where: str, names: list[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ConfigError(f"{where} {twice[0]!r} is given twice")


def _check_group(where: str, group: GroupSpec) -> None:
    if group.names and group.count not in (1, len(group.names)):
        raise ConfigError(f"{where}.count: {group.count}, but names has {len(group.names)}")
    least = {"count": 0 if group.spares else 1, "spares": 0, "tensor_parallel": 1, "processes": 0}
    for name, bound in least.items():
        value = getattr(group, name)
        if not bound <= value <= INSTANCES_MAX:
            raise ConfigError(f"{where}.{name}: {value}, must be between {bound} and {INSTANCES_MAX}")
    if group.engine is EngineName.VLLM and group.processes not in (0, group.size):
        raise ConfigError(f"{where}.processes: {group.processes}, but a vLLM engine has a process of its own")
    if group.tensor_parallel > 1 and group.device == "cpu":
        raise ConfigError(f"{where}.tensor_parallel: {group.tensor_parallel}, but device is cpu; it splits over GPUs")


def _check_step_times(spec: ClusterSpec, where: str, model: ModelSpec, group: GroupSpec) -> None:
    """A real engine's file of step times is of its model; a modelled engine may stand for any other."""
    if group.engine is not EngineName.VLLM:
        return
    given = {f"{where}.step_time": group.step_time, f"{where}.settings.step_time": group.settings.get("step_time")}
    for field, file in {**given, "settings.worker.step_time": spec.settings.worker.get("step_time")}.items():
        if not isinstance(file, str) or not file.endswith(".toml") or not Path(file).is_file():
            continue  # a set that ships, or one that this machine does not have: its reader says so
        try:
            provenance = load_step_time(file).provenance
        except ValueError as error:
            raise ConfigError(f"{field}: {error}") from None
        if provenance is not None and provenance.model not in (model.name, Path(model.path).name):
            raise ConfigError(f"{field}: {file} is of another model, {provenance.model}, not of {model.name}")


def _check_model(where: str, model: ModelSpec, instances: list[str]) -> None:
    if not model.groups:
        raise ConfigError(f"{where}.groups: at least one is needed")
    if len(instances) > INSTANCES_MAX:
        raise ConfigError(f"{where}.groups: {len(instances)} instances, at most {INSTANCES_MAX}")
    if model.stages:
        _check_names(f"{where}.stages[].name", [stage.name for stage in model.stages])
        _check_ranges(f"{where}.stages", model.stages)
        _check_members(f"{where}.stages", model.stages, instances)


def _check_ranges(where: str, stages: list[StageSpec]) -> None:
    """They tile [0, inf) in ascending order."""
    expected: int | None = 0
    for index, stage in enumerate(stages):
        here = f"{where}[{index}]"
        if expected is None:
            raise ConfigError(
                f"{here}: follows {stages[index - 1].name}, which has no length_max and covers all lengths"
            )
        if stage.length_min != expected:
            kind = "overlaps" if stage.length_min < expected else "leaves a gap after"
            before = f"{kind} {stages[index - 1].name}, which ends at {expected}" if index else "the first starts at 0"
            raise ConfigError(f"{here}.length_min: {stage.length_min} {before}")
        if stage.length_max is not None and stage.length_max <= stage.length_min:
            raise ConfigError(f"{here}.length_max: {stage.length_max} is not above length_min {stage.length_min}")
        expected = stage.length_max
    if expected is not None:
        raise ConfigError(f"{where}[{len(stages) - 1}].length_max: {expected}; the last stage must have none")


def _check_members(where: str, stages: list[StageSpec], instances: list[str]) -> None:
    """Every instance in one stage, or none named at all."""
    if len(stages) > len(instances):
        raise ConfigError(f"{where}: {len(stages)} stages for {len(instances)} instances")
    if not any(stage.instances for stage in stages):
        return
    homes: dict[str, str] = {}
    for index, stage in enumerate(stages):
        if not stage.instances:
            raise ConfigError(f"{where}[{index}].instances: empty, but other stages name theirs")
        for pattern in stage.instances:
            for name in _matching(f"{where}[{index}].instances", pattern, instances):
                if homes.setdefault(name, stage.name) != stage.name:
                    raise ConfigError(f"{where}[{index}].instances: {name} is in {homes[name]} already")
    if left := [name for name in instances if name not in homes]:
        raise ConfigError(f"{where}: no stage has instance {left[0]}")


def _matching(where: str, pattern: str, instances: list[str]) -> list[str]:
    found = [name for name in instances if fnmatchcase(name, pattern)]
    if not found:
        raise ConfigError(f"{where}: {pattern!r} is no instance of this model; it has {_some(instances)}")
    return found


def _check_settings(spec: ClusterSpec, workers: list[str]) -> None:
    for name in spec.settings.workers:
        if name not in workers:
            raise ConfigError(f"settings.workers: no such worker {name!r}; there are {_some(workers)}")


def _check_extra_services(services: list[ExtraService], instances: set[str]) -> None:
    _check_names("extra_services[].name", [service.name for service in services])
    for index, service in enumerate(services):
        where = f"extra_services[{index}]"
        if service.name in (*Role, "nats"):
            raise ConfigError(f"{where}.name: {service.name} is a service of every cluster")
        if not service.module.replace(".", "_").isidentifier():
            raise ConfigError(f"{where}.module: {service.module!r} is no Python module")
        if taken := sorted(instances & {f"{service.name}-{number}" for number in range(service.count)}):
            raise ConfigError(f"{where}.name: {taken[0]} is an instance")
        if fixed := sorted({"name", "bus", "telemetry"} & service.settings.keys()):
            raise ConfigError(f"{where}.settings.{fixed[0]}: follows from the rest of the file")


def _check_replicas(spec: ClusterSpec) -> None:
    replicas = spec.kv_replicas
    if replicas.enabled and not replicas.memory_share:
        raise ConfigError("kv_replicas.memory_share: 0, but replicas are enabled")
    if replicas.enabled and not spec.services.migrators:
        raise ConfigError("kv_replicas.enabled: migrators copy them, and services.migrators is false")


def _check_devices(spec: ClusterSpec) -> None:
    groups = [group for model in spec.models for group in model.groups]
    if not any(group.size for group in groups):
        raise ConfigError("models[].groups[].count: no instance at the start, at least one is needed")
    for device, count in spec.devices.items():
        taken = sum(group.devices for group in groups if group.device == device)
        if not 1 <= count <= INSTANCES_MAX or taken > count:
            raise ConfigError(f"devices.{device}: {count}, but the instances at the start take {taken}")


def _check_policies(spec: ClusterSpec) -> None:
    policies = spec.policies
    _check_choice("dispatch", policies.dispatch, DISPATCH_POLICIES)
    _check_choice("stages", policies.stages, STAGE_POLICIES)
    _check_choice("trading", policies.trading, TRADING_POLICIES)
    _check_choice("provisioning", policies.provisioning, PROVISIONING_POLICIES)


def _check_choice(kind: str, choice: PolicyChoice, registry: Registry[Any]) -> None:
    if not choice.name and not choice.parameters:
        return
    registry.choose(choice.name or DEFAULTS[kind], choice.parameters, key="name", table=f"policies.{kind}.")


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
