"""Types of a cluster's specification. Every field but a model's name and path has a default.

    [[models]]
    name = "llama"
    path = "/srv/models/llama"

    [[models.groups]]
    count = 4
    device = "cuda"

is a whole cluster: four vLLM engines, one GPU each, one stage over all sequence lengths.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

import msgspec
from msgspec import field

from millrace.cluster.cascade_spec import CascadeSpec
from millrace.contracts.bounds import Count, Natural, PortNumber, PortOrNone, Processes, Share
from millrace.contracts.channels import Role
from millrace.contracts.plan import InstanceRole


class EngineName(StrEnum):
    """The engine behind an instance."""

    VLLM = "vllm"
    MODELLED = "modelled"


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Instances of one model that are alike.

    Attributes:
        name: Prefix of the workers' names: ``worker-0``, ``worker-1``, ... Groups of the same name, also of different
            models, are numbered on.
        count: Instances at the start; 0 where all are spare.
        names: Names of the instances, in place of ``name`` and ``count``.
        spares: Instances beyond those, which provisioning and `millrace scale` start, and `millrace apply` while others
            change.
        engine: ``vllm`` or ``modelled``.
        device: ``cpu``, or a kind of GPU such as ``h100``.
        tensor_parallel: GPUs per instance.
        step_time: Step-time set that fits these instances (``cpu-8m``) or a ``.toml`` file of one; empty for the one
            that ships with the model, if any.
        role: ``both``, ``prefill`` or ``decode``.
        python: Python of the virtual environment that they run in, one with Millrace and an engine of another version;
            empty for this one. They start without a fork server, some seconds slower.
        host: Name of the provisioner that starts and stops them: ``local`` is the supervisor of this machine.
        processes: Worker processes that share the instances, modelled engines only; 0 for one per 64 instances, and for
            one each where they may be started and stopped: with spare ones, or a provisioning strategy.
        settings: Further fields of WorkerConfig for these instances.
    """

    name: str = "worker"
    count: int = 1
    names: list[str] = []
    spares: int = 0
    engine: EngineName = EngineName.VLLM
    device: str = "cpu"
    tensor_parallel: int = 1
    step_time: str = ""
    role: InstanceRole = InstanceRole.BOTH
    python: str = ""
    host: str = "local"
    processes: int = 0
    settings: dict[str, Any] = {}

    @property
    def size(self) -> int:
        """Instances at the start."""
        return len(self.names) or self.count

    @property
    def devices(self) -> int:
        """Devices that its instances take at the start."""
        return self.size * self.tensor_parallel


class StageSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One range of sequence lengths and the instances that serve it.

    Attributes:
        name: Unique within the model; ``s0`` is the shortest.
        length_min: First length served, tokens.
        length_max: First length no longer served; unset for no bound.
        instances: Names or patterns (``gpu0-*``); empty in every stage for a division by the coordinator.
    """

    name: str
    length_min: Natural = 0
    length_max: int | None = None
    instances: list[str] = []


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One served model.

    Attributes:
        name: Served name; clients ask for it, and it is a token of subjects.
        path: Folder with config.json, tokenizer and weights, relative to the cluster's file; or the name of a model
            that ships.
        groups: Its instances.
        stages: Ranges that tile [0, inf) in ascending order; none for one stage over all lengths.
        reasoning_parser: Parser of its reasoning, a name of vLLM's ``--reasoning-parser``; ``auto`` for what its folder
            calls for (``millrace doctor MODEL`` says which), ``none`` for none.
        tool_call_parser: The same of ``--tool-call-parser``.
        adapters: LoRA adapters, name to folder, each of which clients may ask for as a model.
    """

    name: str
    path: str
    groups: list[GroupSpec] = field(default_factory=lambda: [GroupSpec()])
    stages: list[StageSpec] = []
    reasoning_parser: str = "auto"
    tool_call_parser: str = "auto"
    adapters: dict[str, str] = {}


class PolicyChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A policy by name, with its parameters.

    Attributes:
        name: One that ships, a file that ends in ``.py``, or an entry point. Empty for the default.
        parameters: Fields of the policy's ``Parameters``.
    """

    name: str = ""
    parameters: dict[str, Any] = {}


class ClusterPolicies(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Policies by kind.

    Attributes:
        dispatch: Which instance takes a new request (ingress).
        stages: Which instances serve which lengths (coordinator). Stages that a model names in the file stay as they
            are, whatever the policy.
        trading: Which running sequences move for balance, and which bid wins (broker).
        provisioning: When instances are started and stopped (coordinator). ``instances_min`` and ``instances_max``
            follow from the groups unless they are given.
    """

    dispatch: PolicyChoice = PolicyChoice()
    stages: PolicyChoice = PolicyChoice()
    trading: PolicyChoice = PolicyChoice()
    provisioning: PolicyChoice = PolicyChoice()


class ServiceCounts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Processes of each service.

    Attributes:
        ingresses: They share the API's port.
        predictors: They share the instances; 0 for none. One is hosted by each ingress where ``hosted_instances_max``
            allows, which saves the way over the bus; several are processes of their own.
        coordinators: One is active per model, the others stand by.
        migrators: Whether running sequences can move between instances: a migrator with a broker for each worker.
        hosted_instances_max: Most instances, spare ones included, of a cluster whose ingresses host predictor and
            tagger; each of them then follows every instance. 0 for processes of their own.
    """

    ingresses: Processes = 1
    predictors: Natural = 1
    coordinators: Processes = 1
    migrators: bool = True
    hosted_instances_max: Natural = 64


class ExtraService(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A service of your own beside those that every cluster has: ``python -m MODULE --config FILE``.

    Its processes are started, watched and restarted like the others: each says once a second that it is there
    (millrace.membership.Heartbeat). ``millrace.hosting.service.host`` is such a module's ``main``.

    Attributes:
        name: Prefix of its processes' names: ``census-0``, ``census-1``, ...
        module: Python module that runs it.
        role: Whose rights it has on the bus: one of ``millrace.contracts.channels.Role``.
        count: Processes.
        settings: Fields of its configuration besides ``name``, ``bus`` and ``telemetry``.
    """

    name: str
    module: str
    role: Role
    count: Processes = 1
    settings: dict[str, Any] = {}


class ServiceSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Further fields of the services' configurations, laid over what follows from the rest of the file.

    Attributes:
        ingress, migrator, broker, predictor, tagger, coordinator, judge: For every process of that service.
        worker: For all workers. A group's own ``settings`` lie over it.
        workers: For single workers, by name; over the group's.
    """

    ingress: dict[str, Any] = {}
    worker: dict[str, Any] = {}
    workers: dict[str, dict[str, Any]] = {}
    migrator: dict[str, Any] = {}
    broker: dict[str, Any] = {}
    predictor: dict[str, Any] = {}
    tagger: dict[str, Any] = {}
    coordinator: dict[str, Any] = {}
    judge: dict[str, Any] = {}


class KvReplicaSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """KV replicas: blocks of running sequences copied ahead to a second instance, so that after a crash a sequence goes
    on from its KV and only what lies behind the replica is computed again.

    Attributes:
        enabled: Whether there are any.
        memory_share: Share of each instance's KV blocks that replicas of others may take, 0 to 1. They give way to
            everything else.
        tokens_min: Tokens from which on a sequence gets one.
    """

    enabled: bool = False
    memory_share: Share = 0.25
    tokens_min: Count = 512


class ApiSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The HTTP API.

    Attributes:
        host: Address that it binds.
        port: TCP port; refused where it is taken, because clients are configured with it.
        keys: File of API keys, relative to the cluster's file; empty for none.
        ssl_certfile: Certificate with its chain (PEM), relative too; with ``ssl_keyfile`` the API speaks HTTPS alone.
            It is taken anew when the file changes.
        ssl_keyfile: The certificate's key (PEM), without a passphrase.
    """

    host: str = "127.0.0.1"
    port: PortNumber = 8000
    keys: str = ""
    ssl_certfile: str = ""
    ssl_keyfile: str = ""

    @property
    def scheme(self) -> str:
        return "https" if self.ssl_certfile else "http"


class PageSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The page on which one sees requests move.

    Attributes:
        host: Address that it binds. Beyond loopback a viewer needs the observer's password on the bus.
        port: TCP port; another free one is taken where it is in use. 0 for no page.
    """

    host: str = "127.0.0.1"
    port: PortOrNone = 8001


def reachable(host: str) -> str:
    """Address that reaches a server of this machine which listens on ``host``."""
    return "127.0.0.1" if host in ("0.0.0.0", "::", "") else host


class NatsSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Settings of nats-server.

    Attributes:
        port: For services and the command line; another free one is taken where it is in use. Several
            servers take those behind it, too: one each for clients, and one each for each other.
        servers: 1, or 3 that keep the buckets together: any one may then end without a pause.
        tls: Folder that ``millrace certs`` made, relative to the cluster's file: servers and everybody who connects
            show each other its certificate. Empty for no TLS.
        host: Address that clients are heard on, other than 127.0.0.1 (0.0.0.0 for all) for machines that join.
    """

    host: str = "127.0.0.1"
    port: PortNumber = 4222
    servers: Literal[1, 3] = 1
    tls: str = ""

    @property
    def urls(self) -> list[str]:
        """Of every server, for clients on its machine."""
        return [f"nats://{reachable(self.host)}:{port}" for port in self.ports[: self.servers]]

    @property
    def ports(self) -> range:
        """All that they listen on: first for clients, then for each other."""
        return range(self.port, self.port + (1 if self.servers == 1 else 2 * self.servers))


class TelemetrySpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Logs, traces and metrics of every process.

    Attributes:
        otlp: OTLP/HTTP endpoint; empty for JSON lines in the cluster's folder.
        trace_first_per_s: So many requests of each second are traced, by each ingress.
        trace_sample: Share of further requests that are traced, 0 to 1. Errors, failovers and migrations always are.
        log_format: ``console`` or ``json``.
        log_level: ``debug``, ``info``, ``warning`` or ``error``.
        metrics_port: First port of the processes' Prometheus endpoints.
    """

    otlp: str = ""
    trace_first_per_s: Natural = 20
    trace_sample: Share = 0.01
    log_format: Literal["console", "json"] = "console"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    metrics_port: PortNumber = 9100


class ClusterSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A whole cluster.

    Attributes:
        name: Second token of every subject.
        cascade: Several of the models behind one name; none by default.
        extra_services: Services of your own, on this machine.
        devices: Devices of this machine by kind, such as ``cpu = 2``, that instances share, spare ones included: one
            starts only where its devices are free. A kind that is not named has no bound. With it a cascade's plan may
            have instances change their model.
        kv_replicas: Copies of running sequences' KV for their continuation; off by default.
    """

    name: str = "local"
    models: list[ModelSpec]
    cascade: CascadeSpec | None = None
    devices: dict[str, int] = {}
    policies: ClusterPolicies = ClusterPolicies()
    services: ServiceCounts = ServiceCounts()
    extra_services: list[ExtraService] = []
    kv_replicas: KvReplicaSpec = KvReplicaSpec()
    settings: ServiceSettings = ServiceSettings()
    api: ApiSpec = ApiSpec()
    page: PageSpec = PageSpec()
    nats: NatsSpec = NatsSpec()
    telemetry: TelemetrySpec = TelemetrySpec()
