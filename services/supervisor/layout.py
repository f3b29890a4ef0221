"""Renders a cluster's specification to the processes of one machine. Pure but for `write`."""

from __future__ import annotations

import hashlib
import secrets
import sys
from collections.abc import Iterable, Mapping
from itertools import count, islice
from pathlib import Path
from typing import Any

import msgspec
from millrace.actor.config import BusConfig, TelemetryConfig
from millrace.cluster.model_folders import judge_files, llm_calibration
from millrace.cluster.spec import ClusterSpec, EngineName, reachable
from millrace.cluster.toml_text import cluster_toml
from millrace.cluster.workers import WorkerSlot, workers_of
from millrace.contracts.catalog import Role
from millrace.contracts.kv import CopierKind
from millrace.files import replace_file
from millrace.policies.objectives import configured_objectives, objectives_text
from millrace.policies.step_bounds import StepObjectives
from millrace.supervision.cascade_fields import judge_fields
from millrace.supervision.joining import TOKEN, Token, read_token, token_text
from millrace.supervision.nats_config import NatsServerOptions, nats_config
from millrace.supervision.service_fields import (
    broker_fields,
    coordinator_fields,
    hosted_by_ingress,
    ingress_fields,
    merged,
    migrator_fields,
    migrator_shares,
    shape_of,
    step_time_files,
    worker_fields,
    worker_settings_of,
)
from millrace.supervision.survivors import created
from millrace.telemetry.opening import package_version

from services.supervisor.config import ChildSpec, Imports, Joined, LaunchOptions, SupervisorConfig

#: Provisioning reaches the machine that a cluster began on under this name.
HOST = "local"

#: What the next supervisor needs of a layout, below ``run``.
KEPT = "layout.json"

#: Roles whose passwords a machine that joins needs: of its processes, and of the command line there.
JOINING = (Role.SUPERVISOR, Role.WORKER, Role.MIGRATOR, Role.BROKER, Role.OBSERVER, Role.OPERATOR)


#: Calls that are open at the end may go on for so long, where `ingress.limits.drain_s` says nothing; who types Ctrl-C
#: waits for it. Then they get their error, before the process is killed.
DRAIN_S, STOPPING_MS = 8.0, 2_000


class _Kept(msgspec.Struct):
    passwords: dict[Role, str]
    ports: dict[str, int]
    ingresses: list[int]
    clock_offset_ns: int = 0


class Layout:
    """The files and processes of one cluster."""

    def __init__(self, options: LaunchOptions, before: Layout | None = None) -> None:
        """Draws passwords; nothing is written yet.

        Args:
            before: Of the same cluster, whose passwords, ports and names of ingresses stay.
        """
        self.spec: ClusterSpec = options.spec
        self.joins: Joined | None = options.joins
        self.root = Path(options.directory).absolute()
        self.run_dir = self.root / "run"
        self.passwords = {role: secrets.token_hex(18) for role in Role}  # no dash: `--password -x` is an error
        self.ingresses = list(range(self.spec.services.ingresses))
        self._cores = options.cores
        self._files: dict[Path, bytes] = {}
        self._configurations: list[tuple[str, Path]] = []
        self._metrics_ports: dict[str, int] = {}
        self.clock_offset_ns: int = before.clock_offset_ns if before is not None else 0
        if self.joins is not None:
            self.passwords |= read_token((self.run_dir / TOKEN).read_text()).passwords
        if before is not None:
            self.passwords, self._metrics_ports = before.passwords, dict(before._metrics_ports)

    @classmethod
    def restored(cls, options: LaunchOptions) -> Layout:
        """The layout that was written into the cluster's folder last."""
        layout = cls(options)
        kept = msgspec.json.decode((layout.run_dir / KEPT).read_bytes(), type=_Kept)
        layout.passwords, layout._metrics_ports, layout.ingresses = kept.passwords, kept.ports, kept.ingresses
        layout.clock_offset_ns = kept.clock_offset_ns
        return layout

    @classmethod
    def following(cls, options: LaunchOptions, before: Layout, running: Mapping[str, ChildSpec]) -> Layout:
        """The layout of the same cluster by another specification. An ingress that would change gets another name: it
        runs beside the one that it replaces.

        Args:
            running: Processes by name, as they were started.
        """
        free = (n for n in count() if n not in before.ingresses and f"ingress-{n}" not in running)
        names = [*before.ingresses, *islice(free, options.spec.services.ingresses)]
        layout = cls(options, before)
        layout.ingresses = names[: options.spec.services.ingresses]
        if any(running.get(each.name, each) != each for each in layout.plan().children if each.role == Role.INGRESS):
            layout = cls(options, before)
            layout.ingresses = names[len(before.ingresses) :]
        return layout

    def plan(self) -> SupervisorConfig:
        """Decides every process and prepares its files."""
        spec, services = self.spec, self.spec.services
        self._files, self._configurations = {}, []
        joins, nats = self.joins, [] if self.joins else self._nats()
        slots = workers_of(spec)
        running = [slot for slot in slots if not slot.spare]
        children = (
            [*self._workers(running, slots), *self._migrators()]
            if joins
            else [
                *self._taggers(),
                *self._services("coordinator", range(services.coordinators), self._coordinator_fields(), stop_order=3),
                *self._predictors(),
                *self._workers(running, slots),
                *self._migrators(),
                *self._judges(),
                *self._extra_services(),
                *self._page(),
                *self._ingresses(),
            ]
        )
        config = SupervisorConfig(
            name=self._named("supervisor"),
            directory=str(self.root),
            bus=msgspec.convert(self._bus(Role.SUPERVISOR), BusConfig),
            telemetry=msgspec.convert(
                self._telemetry() | {"log_file": str(self.root / "logs" / "supervisor.log")}, TelemetryConfig
            ),
            nats=[self._stamped(child) for child in nats],
            children=[self._stamped(child) for child in children],
            spares=[self._stamped(child) for child in self._workers([slot for slot in slots if slot.spare], slots)],
            provisioned=spec.policies.provisioning.name not in ("", "none"),
            devices=spec.devices,
            host=self._host,
            leaves=joins is not None,
            ingress_url=self.ingress_url,
            models=[*([spec.cascade.name] if spec.cascade else []), *(model.name for model in spec.models)],
        )
        kept = _Kept(self.passwords, self._metrics_ports, self.ingresses, self.clock_offset_ns)
        self._files[self.run_dir / KEPT] = msgspec.json.encode(kept)
        if self._spans and not joins:
            token = Token(cluster=spec.name, passwords={role: self.passwords[role] for role in JOINING})
            self._files[self.run_dir / TOKEN] = token_text(token).encode()
        self._files[self.run_dir / "supervisor.json"] = msgspec.json.encode(config)
        self._files[self.run_dir / "cluster.toml"] = cluster_toml(spec).encode()
        return config

    def _stamped(self, child: ChildSpec) -> ChildSpec:
        paths = [Path(word) for word in child.command]
        content = b"\n".join(self._files[path] for path in paths if path in self._files)
        content += _build(child.command[0]).encode()
        return msgspec.structs.replace(child, digest=hashlib.sha256(content).hexdigest()[:16])

    @property
    def ingress_url(self) -> str:
        """Base URL of the API, as this machine reaches it; empty where another one has it."""
        if self.joins:
            return ""
        api = self.spec.api
        return f"{api.scheme}://{reachable(api.host)}:{api.port}"

    @property
    def page_url(self) -> str:
        """Of the page; empty where there is none."""
        page = self.spec.page
        return f"http://{reachable(page.host)}:{page.port}/" if page.port else ""

    @property
    def advised_objectives(self) -> str:
        """Objectives that the autopilot advises for; empty where it is off."""
        fields = self._coordinator_fields()
        if self.joins or fields.get("autopilot") == "off" or not fields["recording"]:
            return ""
        steps = msgspec.convert(fields.get("step_bounds", {}), StepObjectives)
        return objectives_text(configured_objectives(fields.get("stages", {}).get("parameters", {}), steps))

    def write(self) -> Path:
        """Writes every file, readable by the owner only (they hold passwords); returns the supervisor's
        configuration.
        """
        for folder in (self.run_dir, self.root / "logs", self.root / "traces"):
            folder.mkdir(parents=True, exist_ok=True)
        self.run_dir.chmod(0o700)
        for path, content in self._files.items():
            replace_file(path, content, private=True)
        return self.run_dir / "supervisor.json"

    def cluster_file(self, supervisor_pid: int, started_ns: int) -> bytes:
        """Content of the file that the command line reads to find this cluster."""
        spec = self.spec
        return msgspec.json.encode(
            {
                "cluster": spec.name,
                "nats_url": ",".join(self._servers),
                "nats_tls": spec.nats.tls,
                "observer_user": str(Role.OBSERVER),
                "observer_password": self.passwords[Role.OBSERVER],
                "operator_user": str(Role.OPERATOR),
                "operator_password": self.passwords[Role.OPERATOR],
                "ingress_url": self.ingress_url,
                "model": spec.models[0].name,
                "models": [model.name for model in spec.models],
                "cascade": spec.cascade.name if spec.cascade is not None else "",
                "supervisor_pid": supervisor_pid,
                "supervisor_created": created(supervisor_pid),
                "clock_offset_ns": self.clock_offset_ns,
                "host": self._host,
                "started_ns": started_ns,
            }
        )

    @property
    def _servers(self) -> list[str]:
        return self.joins.servers if self.joins else self.spec.nats.urls

    @property
    def _spans(self) -> bool:
        """Whether machines may join, or this one has."""
        return self.joins is not None or self.spec.nats.host != "127.0.0.1"

    @property
    def _host(self) -> str:
        return self.joins.name if self.joins else HOST

    def _named(self, name: str) -> str:
        """The name of a process: unique in the cluster also where it is another machine's."""
        return f"{self.joins.name}-{name}" if self.joins else name

    def _nats(self) -> list[ChildSpec]:
        nats = self.spec.nats
        return [self._nats_server(name, index) for index, name in enumerate(nats_names(nats.servers))]

    def _nats_server(self, name: str, index: int) -> ChildSpec:
        spec, count = self.spec, self.spec.nats.servers
        routes = [f"127.0.0.1:{port}" for port in spec.nats.ports[count:]]
        server = NatsServerOptions(
            cluster=spec.name,
            host=spec.nats.host,
            port=spec.nats.ports[index],
            store_dir=str(self.root / "jetstream" / (name if count > 1 else "")),
            server_name=server_name(name),
            routes=tuple(routes[index:] + routes[:index]),
            hosted={Role.MIGRATOR: (Role.BROKER,), Role.INGRESS: hosted_by_ingress(spec)},
            tls=spec.nats.tls,
        )
        path = self.run_dir / f"{name}.conf"
        self._files[path] = nats_config(server, self.passwords).encode()
        command = [str(Path(sys.executable).parent / "nats-server"), "-c", str(path)]
        return ChildSpec(name=name, role="nats", command=command, stop_order=9)

    def _bus(self, role: Role) -> dict[str, Any]:
        """Without TLS it is not mentioned: a group's ``python`` may have a version that does not know it."""
        bus = {"cluster": self.spec.name, "servers": self._servers, "user": str(role), "password": self.passwords[role]}
        return bus | ({"tls": self.spec.nats.tls} if self.spec.nats.tls else {})

    def _telemetry(self) -> dict[str, Any]:
        telemetry = self.spec.telemetry
        return {
            "log_format": telemetry.log_format,
            "log_level": telemetry.log_level,
            "otlp_endpoint": telemetry.otlp,
            "trace_dir": "" if telemetry.otlp else str(self.root / "traces"),
            "trace_sample": telemetry.trace_sample,
            "trace_first_per_s": telemetry.trace_first_per_s,
        }

    def _config_file(self, role: Role, name: str, fields: dict[str, Any], *, checked_as: str = "") -> Path:
        """Args:
        checked_as: Whose configuration it is, where that is not the role.
        """
        path = self.run_dir / f"{name}.json"
        telemetry = self._telemetry() | {"metrics_port": self._metrics_port(name)}
        config = {"name": name, "bus": self._bus(role), "telemetry": telemetry} | fields
        self._files[path] = msgspec.json.encode(config)
        self._configurations.append((checked_as or str(role), path))
        return path

    def _metrics_port(self, name: str) -> int:
        ports = self._metrics_ports
        if name not in ports:
            ports[name] = max([self.spec.telemetry.metrics_port - 1, *ports.values()]) + 1
        return ports[name]

    def copies(self, folder: Path) -> list[tuple[str, Path]]:
        """Writes the configuration files elsewhere, to be checked there; returns role and file of each."""
        for _, path in self._configurations:
            (folder / path.name).write_bytes(self._files[path])
        return [(role, folder / path.name) for role, path in self._configurations]

    def configurations(self) -> list[tuple[str, Path]]:
        """Role and configuration file of each service's process, spare ones included."""
        return self._configurations

    def _services(
        self, noun: str, indices: Iterable[int], fields: dict[str, Any], *, stop_order: int
    ) -> list[ChildSpec]:
        return [self._service(noun, index, fields, stop_order=stop_order) for index in indices]

    def _service(self, noun: str, index: int, fields: dict[str, Any], *, stop_order: int) -> ChildSpec:
        name = self._named(f"{noun}-{index}")
        path = self._config_file(Role(noun), name, fields)
        return _child(noun, name, f"services.{noun}", path, stop_order=stop_order)

    def _extra_services(self) -> list[ChildSpec]:
        """Services of the user's own. They end with the services that follow others."""
        children = []
        for service in self.spec.extra_services:
            for name in (f"{service.name}-{index}" for index in range(service.count)):
                path = self._config_file(service.role, name, service.settings, checked_as=service.name)
                children.append(_child(service.name, name, service.module, path, stop_order=3))
        return children

    def _page(self) -> list[ChildSpec]:
        """As an observer it may publish nothing: it shows no presence."""
        page = self.spec.page
        if not page.port:
            return []
        fields = {"host": page.host, "port": page.port, "folder": str(self.root)}
        path = self._config_file(Role.OBSERVER, "page", fields, checked_as="page")
        return [msgspec.structs.replace(_child("page", "page", "services.page", path, stop_order=3), presences=[])]

    def _ingresses(self) -> list[ChildSpec]:
        """With the actors that each of them hosts."""
        own = self._ingress_fields()
        children = self._services("ingress", self.ingresses, own, stop_order=1)
        drain_s = own["limits"].get("drain_s") if isinstance(own["limits"], dict) else None
        # What is no number is refused, by its name, before anything starts.
        stop_limit_ms = STOPPING_MS + (int(1e3 * drain_s) if isinstance(drain_s, int | float) else 0)
        children = [msgspec.structs.replace(child, stop_limit_ms=stop_limit_ms) for child in children]
        fields = {Role.PREDICTOR: self._predictor_fields(0, 1), Role.TAGGER: self._tagger_fields()}
        hosted = hosted_by_ingress(self.spec)
        return [
            self._hosting(child, index, {role: fields[role] for role in hosted})
            for index, child in zip(self.ingresses, children, strict=True)
        ]

    def _hosting(self, child: ChildSpec, index: int, hosted: dict[Role, dict[str, Any]]) -> ChildSpec:
        """The same process with an actor of each role beside its own."""
        if not hosted:
            return child
        command = [part.replace("services.", "deployment.") for part in child.command]
        for role, fields in hosted.items():
            command += [f"--{role}", str(self._config_file(role, self._named(f"{role}-{index}"), fields))]
        return msgspec.structs.replace(child, command=command)

    def _taggers(self) -> list[ChildSpec]:
        count = 0 if Role.TAGGER in hosted_by_ingress(self.spec) else 1
        return self._services("tagger", range(count), self._tagger_fields(), stop_order=3)

    def _tagger_fields(self) -> dict[str, Any]:
        """With the folder where taggers keep outcomes and length models, over restarts."""
        return merged({"learning": {"directory": str(self.root / "lengths")}}, self.spec.settings.tagger)

    def _coordinator_fields(self) -> dict[str, Any]:
        fields = coordinator_fields(self.spec, self._judge_files()) | {"recording": str(self.root / "recording")}
        return merged(fields, self.spec.settings.coordinator)

    def _ingress_fields(self) -> dict[str, Any]:
        spec = self.spec
        http: dict[str, Any] = {"host": spec.api.host, "port": spec.api.port, "reuse_port": True}
        files = {"keys_file": spec.api.keys, "ssl_certfile": spec.api.ssl_certfile, "ssl_keyfile": spec.api.ssl_keyfile}
        http |= {name: str(Path(file).absolute()) for name, file in files.items() if file}
        return merged(
            {
                "http": http,
                "limits": {"drain_s": DRAIN_S},
                **ingress_fields(spec, lambda model: model.path, self._judge_files()),
            },
            spec.settings.ingress,
        )

    def _judge_files(self) -> dict[str, str]:
        folders = {model.name: Path(model.path) for model in self.spec.models}
        return {name: str(folders[name] / file) for name, file in judge_files(self.spec).items()}

    def _judges(self) -> list[ChildSpec]:
        """Judge processes, for a cascade whose answers are scored by more than ingress's own confidence."""
        cascade = self.spec.cascade
        if cascade is None or not cascade.judge_processes:
            return []
        fields = judge_fields(self.spec, f"{self.ingress_url}/v1", calibration=llm_calibration(self.spec))
        told = merged(fields, self.spec.settings.judge)
        return self._services("judge", range(cascade.judge_processes), told, stop_order=3)

    def _predictors(self) -> list[ChildSpec]:
        count = 0 if Role.PREDICTOR in hosted_by_ingress(self.spec) else self.spec.services.predictors
        return [
            self._service("predictor", index, self._predictor_fields(index, count), stop_order=3)
            for index in range(count)
        ]

    def _predictor_fields(self, shard: int, shards: int) -> dict[str, Any]:
        files = step_time_files(self.spec)
        told = {"step_times": files} if files else {}
        return merged({"shard": shard, "shards": shards, **told}, self.spec.settings.predictor)

    def _migrators(self) -> list[ChildSpec]:
        """For every instance there is or may be. They outlive their workers, which drain through them."""
        return [self._migrator(index, names) for index, names in enumerate(migrator_shares(self.spec))]

    def _migrator(self, index: int, instances: list[str]) -> ChildSpec:
        """With the broker of the same instances."""
        spec = self.spec
        fields = merged(migrator_fields(spec, instances), spec.settings.migrator)
        broker = merged(broker_fields(spec, instances), spec.settings.broker)
        return self._hosting(self._service("migrator", index, fields, stop_order=3), index, {Role.BROKER: broker})

    def _workers(self, some: Iterable[WorkerSlot], every: Iterable[WorkerSlot]) -> list[ChildSpec]:
        vllm = [slot.name for slot in every if slot.group.engine is EngineName.VLLM]
        return [self._worker(slot, vllm.index(slot.name) if slot.name in vllm else -1) for slot in some]

    def _worker(self, slot: WorkerSlot, vllm_index: int) -> ChildSpec:
        """Args:
        vllm_index: Its place among the vLLM workers, which get a core each in turn; -1 for a modelled one.
        """
        fields = worker_fields(slot, slot.model.path)
        core = self._cores[vllm_index % len(self._cores)] if vllm_index >= 0 and slot.group.device == "cpu" else -1
        fields |= {"engine_cores": [core]} if core >= 0 else {}
        if core >= 0 and self._spans:  # by default engines on CPUs exchange KV within a machine only
            fields["migration"] = {"copiers": [CopierKind.SHARED_MEMORY, CopierKind.NIXL]}
        path = self._config_file(Role.WORKER, slot.name, merged(fields, worker_settings_of(self.spec, slot)))
        child = ChildSpec(
            name=slot.name,
            role="worker",
            command=[sys.executable, "-m", "services.worker", "--config", str(path)],
            presences=slot.instances,
            stop_order=2,
            model=slot.model.name,
            shape=shape_of(slot.group),
            device=slot.group.device,
            devices=slot.group.tensor_parallel * len(slot.instances),
        )
        if vllm_index < 0:
            return child
        python = [slot.group.python, "-P"] if slot.group.python else [sys.executable]  # -P: not from this folder
        command = [*python, *child.command[1:]]
        return msgspec.structs.replace(child, command=command, imports=Imports.VLLM, stop_limit_ms=15_000)


def _build(program: str) -> str:
    """A program as far as an upgrade in place changes it: of this environment's Python, the version of Millrace."""
    if program == sys.executable:
        return package_version()
    try:
        found = Path(program).stat()
    except OSError:  # its start will say so
        return ""
    return f"{found.st_size} {found.st_mtime_ns}"


def nats_names(servers: int) -> list[str]:
    """Names of the processes of so many NATS servers."""
    return ["nats"] if servers == 1 else [f"nats-{index}" for index in range(servers)]


def server_name(child: str) -> str:
    """Name that a NATS server has among its like."""
    return f"millrace-{child}"


def _child(noun: str, name: str, module: str, config: Path, *, stop_order: int) -> ChildSpec:
    command = [sys.executable, "-m", module, "--config", str(config)]
    return ChildSpec(name=name, role=noun, command=command, presences=[name], stop_order=stop_order)
