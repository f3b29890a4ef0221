"""Worker processes of a specification and the instances in each. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from millrace.cluster.spec import ClusterSpec, EngineName, GroupSpec, ModelSpec

#: Modelled engines are cheap: so many share one worker process before a second one is worth its memory.
MODELLED_PER_PROCESS = 64


class WorkerSlot(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process.

    Attributes:
        name: Unique in the cluster.
        instances: Names of its instances: its own, or ``<name>-0``, ``<name>-1``, ... where there are several.
        spare: Whether only provisioning starts it.
    """

    name: str
    model: ModelSpec
    group: GroupSpec
    instances: list[str]
    spare: bool = False


def workers_of(spec: ClusterSpec) -> list[WorkerSlot]:
    """Every worker process of the cluster, in the order of the file; a group's spare ones after its others."""
    numbers: dict[str, int] = {}
    return [slot for model in spec.models for group in model.groups for slot in _of_group(spec, model, group, numbers)]


def instances_of(spec: ClusterSpec, model: ModelSpec, *, spares: bool = False) -> list[str]:
    """Instances of one model at the start, or those with the spare ones."""
    slots = (slot for slot in workers_of(spec) if slot.model.name == model.name and (spares or not slot.spare))
    return [name for slot in slots for name in slot.instances]


def _of_group(spec: ClusterSpec, model: ModelSpec, group: GroupSpec, numbers: dict[str, int]) -> Iterator[WorkerSlot]:
    def following() -> str:
        number = numbers.get(group.name, 0)
        numbers[group.name] = number + 1
        return f"{group.name}-{number}"

    for name in group.names:
        yield WorkerSlot(name=name, model=model, group=group, instances=[name])
    for share in [] if group.names else _shares(spec, group):
        name = following()
        yield WorkerSlot(name=name, model=model, group=group, instances=instance_names(name, share))
    for _ in range(group.spares):
        name = following()
        yield WorkerSlot(name=name, model=model, group=group, instances=[name], spare=True)


def _shares(spec: ClusterSpec, group: GroupSpec) -> list[int]:
    if not group.count:
        return []
    if group.engine is EngineName.VLLM:
        return [1] * group.count
    provisioned = spec.policies.provisioning.name not in ("", "none")
    separate = bool(spec.devices) or provisioned or group.spares > 0
    default = group.count if separate else -(-group.count // MODELLED_PER_PROCESS)
    processes = max(1, min(group.count, group.processes or default))
    return [group.count // processes + (index < group.count % processes) for index in range(processes)]


def instance_names(worker: str, share: int) -> list[str]:
    """Instances of a worker process, as WorkerConfig names them."""
    return [worker] if share == 1 else [f"{worker}-{index}" for index in range(share)]
