"""Fields of the services' configurations that follow from a cluster's specification. Pure.

Each function gives what the specification decides; whoever deploys adds names, the bus, telemetry and addresses, and
lays `settings` over it with `merged`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

from millrace.cluster.spec import ClusterSpec, EngineName, GroupSpec, ModelSpec, PolicyChoice, StageSpec
from millrace.cluster.workers import MODELLED_PER_PROCESS, WorkerSlot, instances_of, workers_of
from millrace.contracts.channels import Role
from millrace.contracts.plan import InstanceRole
from millrace.supervision.cascade_fields import coordinator_cascades, ingress_cascades, with_judge

NO_JUDGES: Mapping[str, str] = MappingProxyType({})

#: KV cache of one vLLM engine on CPU. With the models that ship, over 30,000 tokens.
CPU_KV_BYTES = 256 * 1024 * 1024

#: Step-time sets measured with the models that ship, and with the random one for load experiments, by their folder.
STEP_TIMES = {
    "millrace-mini": "cpu-8m",
    "millrace-micro": "cpu-2m",
    "millrace-nano": "cpu-500k",
    "millrace-judge": "cpu-2m",
    "millrace-load-100m": "cpu-100m",
}


def ingress_fields(
    spec: ClusterSpec, path_of: Callable[[ModelSpec], str], judges: Mapping[str, str] = NO_JUDGES
) -> dict[str, Any]:
    """Models, the cascade and the dispatch policy.

    Args:
        path_of: Where ingress finds a model's folder.
        judges: File of the confidence judge of each model that has one, as ingress finds it.
    """
    models = [
        with_judge({"name": model.name, "path": path_of(model)} | _parsers(model), model, judges)
        for model in spec.models
    ]
    fields: dict[str, Any] = {"models": models, **ingress_cascades(spec)}
    if dispatch := _chosen("policy", spec.policies.dispatch):
        fields["dispatch"] = dispatch
    return fields


def hosted_by_ingress(spec: ClusterSpec) -> tuple[Role, ...]:
    """Roles whose one actor every ingress has in its own process."""
    instances = sum(len(slot.instances) for slot in workers_of(spec))
    if instances > spec.services.hosted_instances_max:
        return ()
    counts = {Role.PREDICTOR: spec.services.predictors, Role.TAGGER: 1}
    return tuple(role for role, count in counts.items() if count == 1)


def coordinator_fields(spec: ClusterSpec, judges: Mapping[str, str] = NO_JUDGES) -> dict[str, Any]:
    """Roles, stages, provisioning and the cascade. The bounds of provisioning hold for each model: the fewest
    instances that one has at the start, and the most with its spare ones.
    """
    slots = workers_of(spec)
    roles = {n: str(s.group.role) for s in slots for n in s.instances if s.group.role is not InstanceRole.BOTH}
    fields: dict[str, Any] = {"roles": roles} if roles else {}
    if stages := _stages(spec):
        fields["stages"] = stages
    hosts = list(dict.fromkeys(slot.group.host for slot in slots))
    if hosts != ["local"]:
        fields["provisioning"] = {"hosts": hosts}
    choice = spec.policies.provisioning
    if choice.name not in ("", "none"):
        bounds = {
            "instances_min": min(len(instances_of(spec, model)) for model in spec.models),
            "instances_max": max(len(instances_of(spec, model, spares=True)) for model in spec.models),
        }
        chosen = {"strategy": choice.name, "parameters": bounds | choice.parameters}
        fields["provisioning"] = fields.get("provisioning", {}) | chosen
    return fields | coordinator_cascades(spec, judges)


def _stages(spec: ClusterSpec) -> dict[str, Any]:
    """The policy, and the ranges of models that name theirs; empty for what the coordinator does by itself."""
    fields = _chosen("policy", spec.policies.stages)
    ranges = {
        model.name: [_range(stage, instances_of(spec, model)) for stage in model.stages]
        for model in spec.models
        if model.stages
    }
    return {**fields, **({"ranges": ranges} if ranges else {})}


def _range(stage: StageSpec, instances: list[str]) -> dict[str, Any]:
    """One stage of the policy `fixed`: those that it names are its own."""
    fields: dict[str, Any] = {"length_min": stage.length_min, "length_max": stage.length_max}
    if not stage.instances:
        return fields
    count = sum(any(fnmatchcase(name, pattern) for pattern in stage.instances) for name in instances)
    return {**fields, "members": stage.instances, "instances": count}


def migrator_fields(spec: ClusterSpec, instances: list[str]) -> dict[str, Any]:
    """Its instances, and which sequences get KV replicas."""
    replicas = spec.kv_replicas
    fields: dict[str, Any] = {"instances": instances}
    if not replicas.enabled:
        return fields
    return fields | {"replicas": {"enabled": True, "tokens_min": replicas.tokens_min}}


def broker_fields(spec: ClusterSpec, instances: list[str]) -> dict[str, Any]:
    """Its instances, whether they move sequences for balance, and the step-time files that forecasts need."""
    files, trading = step_time_files(spec), _chosen("policy", spec.policies.trading)
    fields: dict[str, Any] = {"instances": instances, **({"step_times": files} if files else {})}
    return fields | ({"trading": trading} if trading else {})


def _parsers(model: ModelSpec) -> dict[str, str]:
    """Parsers of a model's output that its folder does not choose."""
    asked = {"reasoning_parser": model.reasoning_parser, "tool_call_parser": model.tool_call_parser}
    return {key: name for key, name in asked.items() if name != "auto"}


def worker_fields(slot: WorkerSlot, model_path: str) -> dict[str, Any]:
    """The engine of a worker.

    Args:
        model_path: Where the worker finds the model's folder.
    """
    group = slot.group
    fields: dict[str, Any] = {"model": slot.model.name, "model_path": model_path, "engine": str(group.engine)}
    fields["shape"] = shape_of(group)
    if group.engine is EngineName.VLLM and slot.model.reasoning_parser != "auto":
        fields["engine_args"] = {"reasoning_parser": slot.model.reasoning_parser.removeprefix("none")}
    if group.engine is EngineName.MODELLED:
        modelled = {"modelled": {"coefficients": group.step_time}} if group.step_time else {}
        return {**fields, "instances": len(slot.instances), **modelled}
    if slot.model.adapters:
        fields["adapters"] = {name: str(Path(path).absolute()) for name, path in slot.model.adapters.items()}
    if group.device == "cpu":
        known = STEP_TIMES.get(Path(slot.model.path).name, "")
        return {**fields, "kv_bytes": CPU_KV_BYTES, "step_time": group.step_time or known}
    told = {"step_time": group.step_time} if group.step_time else {}
    return {**fields, "tensor_parallel_size": group.tensor_parallel, "block_size": 16, **told}


def worker_settings_of(spec: ClusterSpec, slot: WorkerSlot) -> dict[str, Any]:
    """The share for KV replicas, over it settings of all workers, over them those of its group, over them its own."""
    own, replicas = spec.settings.workers.get(slot.name, {}), spec.kv_replicas
    share = {"migration": {"replicas": {"memory_share": replicas.memory_share}}} if replicas.enabled else {}
    return merged(merged(merged(share, spec.settings.worker), slot.group.settings), own)


def step_time_files(spec: ClusterSpec) -> dict[str, str]:
    """Step-time files that workers name, with their absolute paths: what predictors are told to read."""
    told = [spec.settings.worker, *spec.settings.workers.values(), *(group.settings for group in _groups(spec))]
    modelled = [fields["modelled"] for fields in told if isinstance(fields.get("modelled"), dict)]
    named = [*(fields.get("step_time") for fields in told), *(fields.get("coefficients") for fields in modelled)]
    named += [group.step_time for group in _groups(spec)]
    return {name: str(Path(name).absolute()) for name in named if isinstance(name, str) and name.endswith(".toml")}


def migrator_shares(spec: ClusterSpec) -> list[list[str]]:
    """Instances of each migrator: those of one worker process; of modelled engines many, unless their processes were
    counted by hand. Spare instances are among them: a migrator waits for them to be started.
    """
    if not spec.services.migrators:
        return []
    shares: list[list[str]] = []
    for _, slots in groupby(workers_of(spec), key=lambda slot: (slot.model.name, id(slot.group))):
        own = list(slots)
        if own[0].group.engine is EngineName.VLLM or own[0].group.processes:
            shares += [slot.instances for slot in own]
            continue
        every = [name for slot in own for name in slot.instances]
        shares += [every[at : at + MODELLED_PER_PROCESS] for at in range(0, len(every), MODELLED_PER_PROCESS)]
    return shares


def shape_of(group: GroupSpec) -> str:
    """Return the hardware that instances of this group run on: ``cpu``, ``h100``, ``h100x2``."""
    return group.device + (f"x{group.tensor_parallel}" if group.tensor_parallel > 1 else "")


def merged(fields: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``fields`` with ``over`` laid over them, table by table."""
    result = dict(fields)
    for key, value in over.items():
        held = result.get(key)
        result[key] = merged(held, value) if isinstance(held, dict) and isinstance(value, dict) else value
    return result


def _groups(spec: ClusterSpec) -> Iterable[GroupSpec]:
    return [group for model in spec.models for group in model.groups]


def _chosen(key: str, choice: PolicyChoice) -> dict[str, Any]:
    """The choice as a service's configuration has it; empty for the service's own default."""
    told = {key: choice.name, "parameters": choice.parameters}
    return {name: value for name, value in told.items() if value}
