"""Configuration of the supervisor: what one machine's cluster consists of."""

from __future__ import annotations

from enum import StrEnum

import msgspec
from millrace.actor.config import BusConfig, TelemetryConfig
from millrace.cluster.spec import ClusterSpec


class Joined(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cluster of another machine, which this machine's engines join. Its token is in the folder.

    Attributes:
        name: Of this machine: instances and processes are called by it.
        servers: URLs of the cluster's NATS servers.
    """

    name: str
    servers: list[str]


class LaunchOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cluster to run on this machine.

    Attributes:
        directory: Folder of the cluster's files.
        cores: Cores that engines are pinned to, one each, in turn; empty for all of this process.
        joins: Where the cluster is, if it runs on another machine; of the specification only engines start then.
    """

    spec: ClusterSpec
    directory: str = ".millrace"
    cores: list[int] = []
    joins: Joined | None = None


class Imports(StrEnum):
    """Imports of a child that another process can have ready for it."""

    SERVICES = "services"
    VLLM = "vllm"


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One process to keep running. A later version may have written it down, with fields that are not known here.

    Attributes:
        name: Unique among the children; its log is ``<name>.log``.
        role: The role under which it shows its presence.
        command: Program and arguments.
        imports: Chooses the fork server that starts it.
        presences: Names that show presence once it is ready (several where one process hosts several actors). Without
            any, it is ready as soon as it runs.
        stop_order: Children with a lower number are asked to stop first.
        stop_limit_ms: How long it may take to stop before it is killed.
        model: Of a worker: what it serves; empty for any.
        shape: Of a worker: what it runs on, such as ``cpu`` or ``h100x2``; empty for unknown.
        device: Of a worker: the kind of device that it takes; empty for unknown.
        devices: How many of them.
        digest: Of its files: two that are equal differ in nothing that a start would change.
    """

    name: str
    role: str
    command: list[str] = []
    imports: Imports = Imports.SERVICES
    presences: list[str] = []
    stop_order: int = 0
    stop_limit_ms: int = 10_000
    model: str = ""
    shape: str = ""
    device: str = ""
    devices: int = 0
    digest: str = ""


class SupervisorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of the supervisor of a local cluster.

    Attributes:
        name: Unique name on the bus.
        directory: Folder of the cluster's files (``.millrace``).
        nats: The NATS servers' processes; started first, stopped last.
        children: Everything else.
        spares: Workers that are not started at first, one instance each: what provisioning may add.
        provisioned: Whether a policy starts and stops workers.
        devices: Devices by kind that its workers share; kinds that are not named have no bound but the spares.
        host: Under this name provisioning reaches this machine.
        leaves: Whether it leaves a cluster that goes on: its workers drain before anything here stops.
        ingress_url: Base URL of the API; it is polled for ``/ready`` at start.
        models: Served model names; the first is in the example that is printed.
        ready_limit_s: How long the whole start may take before it is called failed, seconds. A first start compiles the
            model, minutes for a large one.
    """

    name: str = "supervisor"
    directory: str = ".millrace"
    bus: BusConfig = BusConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    nats: list[ChildSpec] = []
    children: list[ChildSpec]
    spares: list[ChildSpec] = []
    provisioned: bool = False
    devices: dict[str, int] = {}
    host: str = "local"
    leaves: bool = False
    ingress_url: str = ""
    models: list[str] = []
    ready_limit_s: float = 600.0
