"""Files that the services of a cluster read in containers, under docker compose and Kubernetes alike. Pure but for the
file of API keys and a judge's calibration.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace.cluster.model_folders import llm_calibration
from millrace.cluster.spec import ClusterSpec
from millrace.cluster.workers import WorkerSlot, workers_of
from millrace.contracts.catalog import Role
from millrace.supervision.cascade_fields import judge_fields
from millrace.supervision.nats_config import NatsServerOptions, nats_config
from millrace.supervision.service_fields import (
    broker_fields,
    coordinator_fields,
    ingress_fields,
    merged,
    migrator_fields,
    worker_fields,
    worker_settings_of,
)

from compose.containers import broker_of, migrator_of, mounted

METRICS_PORT = 9100

#: Where containers reach the bus and the API.
NATS = ("nats://nats:4222",)
API = "http://ingress:8000"


def service_files(
    spec: ClusterSpec, passwords: Mapping[str, str], *, otlp: str, servers: tuple[str, ...] = NATS
) -> dict[str, str]:
    """Content of each service's file by its name, and of the file of API keys where the cluster has one.

    Args:
        passwords: By role.
        otlp: OTLP/HTTP endpoint of spans; empty for none.
        servers: URLs of the bus.
    """
    telemetry = {
        "log_format": "json",
        "otlp_endpoint": otlp,
        "metrics_port": METRICS_PORT,
        "metrics_host": "0.0.0.0",
    }

    def file(name: str, role: Role, fields: dict[str, Any]) -> str:
        bus = bus_fields(role, passwords, spec.name, servers=servers)
        return json.dumps({"name": name, "bus": bus, "telemetry": telemetry, **fields}, indent=1)

    settings = spec.settings
    files = {
        "buckets.json": json.dumps(bus_fields(Role.SUPERVISOR, passwords, spec.name, servers=servers)),
        "tagger.json": file("tagger-0", Role.TAGGER, settings.tagger),
        "predictor.json": file("predictor-0", Role.PREDICTOR, settings.predictor),
        "coordinator.json": file(
            "coordinator-0", Role.COORDINATOR, merged(coordinator_fields(spec), settings.coordinator)
        ),
        "ingress.json": file("ingress-0", Role.INGRESS, _ingress(spec)),
        "page.json": file("page", Role.OBSERVER, {"host": "0.0.0.0", "port": 8001}),
    }
    if spec.cascade is not None:
        fields = judge_fields(spec, f"{API}/v1", calibration=llm_calibration(spec))
        files["judge.json"] = file("judge-0", Role.JUDGE, merged(fields, settings.judge))
    if spec.api.keys:
        files["keys.toml"] = Path(spec.api.keys).read_text()
    for slot in workers_of(spec):
        files[f"{slot.name}.json"] = file(slot.name, Role.WORKER, _worker(spec, slot))
        migrator = migrator_of(slot.name)
        fields = merged(migrator_fields(spec, slot.instances), settings.migrator)
        files[f"{migrator}.json"] = file(migrator, Role.MIGRATOR, fields)
        broker = broker_of(slot.name)
        files[f"{broker}.json"] = file(
            broker, Role.BROKER, merged(broker_fields(spec, slot.instances), settings.broker)
        )
    return files


def nats_file(spec: ClusterSpec, passwords: Mapping[str, str], *, name: str = "", routes: tuple[str, ...] = ()) -> str:
    """The configuration of one nats-server.

    Args:
        passwords: By role.
        name: Of this one of several servers.
        routes: ``host:port`` of each of them, this one's first, as this one listens on it; empty for one alone.
    """
    options = NatsServerOptions(
        cluster=spec.name,
        host="0.0.0.0",
        monitor_port=8222,
        store_dir="/data",
        server_name=name or "millrace-nats",
        routes=routes,
        hosted={Role.MIGRATOR: (Role.BROKER,)},
    )
    return nats_config(options, {role: passwords[role] for role in Role})


def bus_fields(
    role: Role, passwords: Mapping[str, str], cluster: str, *, servers: tuple[str, ...] = NATS
) -> dict[str, Any]:
    """Fields of a role's BusConfig."""
    return {"cluster": cluster, "servers": list(servers), "user": str(role), "password": passwords[role]}


def _ingress(spec: ClusterSpec) -> dict[str, Any]:
    http = {"host": "0.0.0.0", "port": 8000, "url": API}
    if spec.api.keys:
        http["keys_file"] = "/run/secrets/keys.toml"
    fields = ingress_fields(spec, lambda model: mounted(spec, model))
    return merged({"http": http, **fields}, spec.settings.ingress)


def _worker(spec: ClusterSpec, slot: WorkerSlot) -> dict[str, Any]:
    fields = worker_fields(slot, mounted(spec, slot.model))
    fields["migration"] = {"socket_folder": "/kv"}
    return merged(fields, worker_settings_of(spec, slot))
