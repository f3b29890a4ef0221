"""Renders a cluster's specification to services of docker compose: workers, their migrators, mounted models.
Pure but for the cores of this machine.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from millrace.cluster.spec import ClusterSpec, ModelSpec
from millrace.cluster.workers import WorkerSlot

from compose.model_mounts import mount_source

HERE = Path(__file__).resolve().parent

#: The service that holds the namespaces of GPU workers (compose.yaml).
NAMESPACES = "namespaces"

#: Profile of workers that only provisioning starts.
SPARE = "spare"


def compose_services(spec: ClusterSpec, slots: list[WorkerSlot], out: Path) -> dict[str, Any]:
    """The content of workers.yaml.

    Args:
        spec: The cluster.
        slots: Its workers.
        out: Folder of the generated files.
    """
    services: dict[str, Any] = {}
    gpus = sum(slot.group.tensor_parallel for slot in slots if slot.group.device != "cpu")
    together = sum(slot.group.device != "cpu" for slot in slots) > 1
    first_device = 0
    for index, slot in enumerate(slots):
        if slot.group.device == "cpu":
            services[slot.name] = _compose_worker(spec, slot) | _core(index)
            continue
        own = range(first_device, first_device + slot.group.tensor_parallel)
        first_device += slot.group.tensor_parallel
        worker = _compose_worker(spec, slot) | _gpus(own, range(gpus))
        services[slot.name] = _in_one_namespace(worker) if together else worker
    names = [f"{slot.name}.json" for slot in slots]
    services |= {migrator_of(slot.name): _compose_migrator(slot.name, spec) for slot in slots}
    names += [f"{name}.json" for slot in slots for name in (migrator_of(slot.name), broker_of(slot.name))]
    servers = nats_servers(spec)
    names += [f"{host}.conf" for host in servers]
    services |= _compose_nats(servers)
    services["ingress"] = _mounts(spec, spec.models)
    if spec.api.keys:
        names.append("keys.toml")
        services["ingress"] |= {"secrets": ["keys.toml"]}
    if not services["ingress"]:
        del services["ingress"]
    return {
        "services": services,
        "secrets": {name: {"file": str(out / name)} for name in names},
        "volumes": {f"jetstream-{host}": {} for host in servers if host != "nats"},
    }


def nats_servers(spec: ClusterSpec) -> dict[str, tuple[str, int]]:
    """Services of the NATS servers; of each the variable that names its port on this host, and that port by default."""
    others = {f"nats-{n}": (f"MILLRACE_NATS_{n}_PORT", 4222 + n) for n in range(1, spec.nats.servers)}
    return {"nats": ("MILLRACE_NATS_PORT", 4222), **others}


def _compose_nats(servers: dict[str, tuple[str, int]]) -> dict[str, Any]:
    """Parts of each NATS server; the buckets wait for all, since each keeps a copy."""
    services: dict[str, Any] = {}
    for host, (variable, port) in servers.items():
        services[host] = {"ports": [f"127.0.0.1:${{{variable}:-{port}}}:4222"]}
        if host != "nats":
            services[host] |= {
                "extends": {"file": str(HERE / "compose.yaml"), "service": "nats"},
                "secrets": [{"source": f"{host}.conf", "target": "/run/secrets/nats.conf"}],
                "volumes": [f"jetstream-{host}:/data"],
            }
    command = ["services.supervisor.buckets", "--config", "/run/secrets/buckets.json", "--replicas", str(len(servers))]
    healthy = {host: {"condition": "service_healthy"} for host in servers}
    return services | {"buckets": {"command": command, "depends_on": healthy}}


def _compose_worker(spec: ClusterSpec, slot: WorkerSlot) -> dict[str, Any]:
    service: dict[str, Any] = {
        "extends": {"file": str(HERE / "worker.yaml"), "service": "worker"},
        "command": ["services.worker", "--config", f"/run/secrets/{slot.name}.json"],
        "secrets": [f"{slot.name}.json"],
        "depends_on": {"buckets": {"condition": "service_completed_successfully"}},
        "profiles": [profile_of(spec)],
        **_mounts(spec, [slot.model]),
    }
    # Whether a spare one runs is for the provisioner to say; docker must not start again what it has stopped.
    return service | ({"profiles": [SPARE], "restart": "no"} if slot.spare else {})


def _core(index: int) -> dict[str, Any]:
    """One core per CPU worker, in turn."""
    cores = sorted(os.sched_getaffinity(0))
    bounds = {"limits": {"cpus": "1", "memory": "6g"}, "reservations": {"cpus": "0.5", "memory": "1g"}}
    return {"cpuset": str(cores[index % len(cores)]), "deploy": {"resources": bounds}}


def _gpus(own: range, node: range) -> dict[str, Any]:
    """Devices of a worker: its own first, which vLLM takes, then the others of the cluster.

    CUDA maps another process's memory only where that memory's GPU is visible.
    """
    reservation = {"driver": "nvidia", "device_ids": [str(device) for device in node], "capabilities": ["gpu"]}
    visible = [*own, *(device for device in node if device not in own)]
    return {
        "deploy": {"resources": {"reservations": {"devices": [reservation]}}},
        "environment": {"CUDA_VISIBLE_DEVICES": ",".join(map(str, visible))},
        # CUDA and NCCL lock host memory that the GPU reads directly.
        "ulimits": {"memlock": -1},
    }


def _in_one_namespace(worker: dict[str, Any]) -> dict[str, Any]:
    """A worker in the ipc and pid namespaces of all GPU workers of the node, without which CUDA shares no memory."""
    started = {NAMESPACES: {"condition": "service_started"}}
    shared = f"service:{NAMESPACES}"
    # The namespace has its process 1 already.
    return worker | {"ipc": shared, "pid": shared, "init": False, "depends_on": worker["depends_on"] | started}


def migrator_of(worker: str) -> str:
    """Name of a worker's migrator."""
    return f"migrator-{worker.removeprefix('worker-')}"


def broker_of(worker: str) -> str:
    """Name of a worker's broker, which its migrator hosts."""
    return f"broker-{worker.removeprefix('worker-')}"


def _compose_migrator(worker: str, spec: ClusterSpec) -> dict[str, Any]:
    """A migrator with its broker, also of a spare worker: it waits for it to be started."""
    files = [f"{migrator_of(worker)}.json", f"{broker_of(worker)}.json"]
    paths = [f"/run/secrets/{file}" for file in files]
    return {
        "extends": {"file": str(HERE / "worker.yaml"), "service": "migrator"},
        "command": ["deployment.migrator", "--config", paths[0], "--broker", paths[1]],
        "secrets": files,
        "depends_on": {"buckets": {"condition": "service_completed_successfully"}},
        "profiles": [profile_of(spec)],
    }


def mounted(spec: ClusterSpec, model: ModelSpec) -> str:
    """Return a model's path in containers: at the templates' mount for the first, beside it for each other one."""
    within = Path(model.path).relative_to(mount_source(model))
    return str(mount_point(spec, model) / within)


def mount_point(spec: ClusterSpec, model: ModelSpec) -> Path:
    """Path of a model's mounted folder in containers."""
    index = spec.models.index(model)
    return Path(f"/models/{index}" if index else "/model")


def _mounts(spec: ClusterSpec, models: list[ModelSpec]) -> dict[str, Any]:
    """Volumes of models that the templates do not mount."""
    others = [f"{mount_source(m)}:{mount_point(spec, m)}:ro" for m in models if m != spec.models[0]]
    others += [f"{path}:{path}:ro" for m in models for path in m.adapters.values()]
    return {"volumes": others} if others else {}


def profile_of(spec: ClusterSpec) -> str:
    """Compose profile of the cluster's workers: ``cpu`` or ``gpu``."""
    return "cpu" if spec.models[0].groups[0].device == "cpu" else "gpu"
