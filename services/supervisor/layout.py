"""Plans a local cluster: which processes, with which configuration files. Pure but for `write`."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path
from typing import Any

import msgspec
from millrace.actor.config import BusConfig, TelemetryConfig
from millrace.actor.errors import ConfigError
from millrace.contracts.catalog import Role
from millrace.supervision.nats_config import NatsServerOptions, nats_config

from services.supervisor.config import ChildSpec, SupervisorConfig

#: vLLM on CPU pays one core per engine; more engines than this are for GPU nodes and compose.
VLLM_INSTANCES_MAX = 4

#: Modelled engines are cheap: this many share one worker process before a second one is worth its memory.
MODELLED_PER_PROCESS = 64

#: Modelled engines where nobody says how many.
MODELLED_INSTANCES = 8

#: Instances of modelled engines that one machine is asked to run at most.
INSTANCES_MAX = 2_000

#: KV cache of one vLLM engine on CPU. With the models that ship, over 30,000 tokens.
VLLM_KV_BYTES = 256 * 1024 * 1024

#: Step-time sets measured with the models that ship, and with the random one for load experiments, by their folder.
STEP_TIMES = {
    "millrace-mini": "cpu-8m",
    "millrace-micro": "cpu-2m",
    "millrace-nano": "cpu-500k",
    "millrace-load-100m": "cpu-100m",
}


class UpOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a person asked for.

    Attributes:
        engine: ``vllm`` or ``modelled``.
        instances: Engines; 0 for the default (cores, at most four; 8 modelled).
        model: Served name.
        model_path: Folder of the model.
        policy: Dispatch policy.
        processes: Worker processes of modelled engines; 0 for one per 64 engines.
        ingresses: Ingress processes sharing the port.
        keys: File of API keys; empty for none.
        trace_sample: Share of requests traced.
        provision: Provisioning strategy of the coordinator; empty for none.
        instances_max: Engines that may run at once where instances are added; 0 for twice those at the start
            (vLLM: no more than cores).
        predictors: Predictor processes that share the instances; 0 for none.
        migrators: Whether running sequences can move between instances.
        migrator: Further fields of MigratorConfig, by name.
        worker: Further fields of WorkerConfig, by name.
        workers: The same for single workers, by the name of the worker and laid over ``worker``: unequal engines.
        ingress: Further fields of IngressConfig, by name.
        coordinator: Further fields of CoordinatorConfig, by name.
    """

    directory: str = ".millrace"
    cluster: str = "local"
    engine: str = "vllm"
    instances: int = 0
    model: str = "millrace-mini"
    model_path: str = ""
    policy: str = ""
    host: str = "127.0.0.1"
    port: int = 8000
    nats_port: int = 4222
    nats_monitor_port: int = 8222
    metrics_port: int = 9100
    processes: int = 0
    ingresses: int = 1
    keys: str = ""
    otlp: str = ""
    trace_sample: float = 1.0
    log_format: str = "console"
    log_level: str = "info"
    cores: list[int] = msgspec.field(default_factory=lambda: sorted(os.sched_getaffinity(0)))
    predictors: int = 1
    migrators: bool = True
    migrator: dict[str, Any] = msgspec.field(default_factory=dict)
    worker: dict[str, Any] = msgspec.field(default_factory=dict)
    workers: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    ingress: dict[str, Any] = msgspec.field(default_factory=dict)
    provision: str = ""
    instances_max: int = 0
    coordinator: dict[str, Any] = msgspec.field(default_factory=dict)

    def instances_first(self) -> int:
        """Engines at the start."""
        default = min(len(self.cores), VLLM_INSTANCES_MAX) if self.engine == "vllm" else MODELLED_INSTANCES
        return self.instances or default

    def instances_bound(self) -> int:
        """Engines that may run at once."""
        first = self.instances_first()
        if not self.provision and not self.instances_max:
            return first
        default = len(self.cores) if self.engine == "vllm" else 2 * first
        return max(first, self.instances_max or default)


class Layout:
    """The files and processes of one cluster."""

    def __init__(self, options: UpOptions) -> None:
        """Draws passwords; nothing is written yet."""
        self.options = options
        self.root = Path(options.directory).absolute()
        self.run_dir = self.root / "run"
        self.passwords = {role: secrets.token_hex(18) for role in Role}  # no dash: `--password -x` is an error
        self._files: dict[Path, bytes] = {}
        self._metrics_ports = iter(range(options.metrics_port, options.metrics_port + 1000))

    def plan(self) -> SupervisorConfig:
        """Decides every process and prepares its files.

        Raises:
            ConfigError: settings are for a worker that there is not.
        """
        options = self.options
        nats = self._nats()
        children = [
            *self._service("tagger", "tagger-0", self._learning(), stop_order=3),
            *self._coordinator(),
            *[child for index in range(options.predictors) for child in self._predictor(index)],
            *self._workers(),
            *self._migrators(),
            *[child for index in range(options.ingresses) for child in self._ingress(index)],
        ]
        config = SupervisorConfig(
            directory=str(self.root),
            bus=msgspec.convert(self._bus(Role.SUPERVISOR), BusConfig),
            telemetry=msgspec.convert(
                self._telemetry() | {"log_file": str(self.root / "logs" / "supervisor.log")}, TelemetryConfig
            ),
            nats=nats,
            nats_monitor_url=f"http://127.0.0.1:{options.nats_monitor_port}",
            children=children,
            spares=self._spares(),
            ingress_url=f"http://{_reachable(options.host)}:{options.port}",
            model=options.model,
        )
        self._refuse_unknown_workers([spec.name for spec in [*children, *config.spares] if spec.role == "worker"])
        self._files[self.run_dir / "supervisor.json"] = msgspec.json.encode(config)
        return config

    def _refuse_unknown_workers(self, names: list[str]) -> None:
        for name in self.options.workers:
            if name not in names:
                raise ConfigError(f"--worker-set {name}: no such worker; there are {', '.join(names)}")

    def write(self) -> Path:
        """Writes every file, readable by the owner only (they hold passwords); returns the supervisor's
        configuration.
        """
        for folder in (self.run_dir, self.root / "logs", self.root / "traces"):
            folder.mkdir(parents=True, exist_ok=True)
        self.run_dir.chmod(0o700)
        for path, content in self._files.items():
            path.touch(mode=0o600)
            path.write_bytes(content)
        return self.run_dir / "supervisor.json"

    def cluster_file(self, supervisor_pid: int, started_ns: int) -> bytes:
        """What the command line reads to find this cluster."""
        options = self.options
        return msgspec.json.encode(
            {
                "cluster": options.cluster,
                "nats_url": f"nats://127.0.0.1:{options.nats_port}",
                "observer_user": str(Role.OBSERVER),
                "observer_password": self.passwords[Role.OBSERVER],
                "operator_user": str(Role.OPERATOR),
                "operator_password": self.passwords[Role.OPERATOR],
                "ingress_url": f"http://{_reachable(options.host)}:{options.port}",
                "model": options.model,
                "supervisor_pid": supervisor_pid,
                "started_ns": started_ns,
            }
        )

    def _nats(self) -> ChildSpec:
        options = self.options
        server = NatsServerOptions(
            cluster=options.cluster,
            port=options.nats_port,
            monitor_port=options.nats_monitor_port,
            store_dir=str(self.root / "jetstream"),
        )
        path = self.run_dir / "nats.conf"
        self._files[path] = nats_config(server, self.passwords).encode()
        command = [str(Path(sys.executable).parent / "nats-server"), "-c", str(path)]
        return ChildSpec(name="nats", role="nats", command=command, stop_order=9)

    def _bus(self, role: Role) -> dict[str, Any]:
        return {
            "cluster": self.options.cluster,
            "servers": [f"nats://127.0.0.1:{self.options.nats_port}"],
            "user": str(role),
            "password": self.passwords[role],
        }

    def _telemetry(self) -> dict[str, Any]:
        options = self.options
        return {
            "log_format": options.log_format,
            "log_level": options.log_level,
            "otlp_endpoint": options.otlp,
            "trace_dir": "" if options.otlp else str(self.root / "traces"),
            "trace_sample": options.trace_sample,
        }

    def _config_file(self, role: Role, name: str, fields: dict[str, Any]) -> Path:
        path = self.run_dir / f"{name}.json"
        telemetry = self._telemetry() | {"metrics_port": next(self._metrics_ports)}
        config = {"name": name, "bus": self._bus(role), "telemetry": telemetry} | fields
        self._files[path] = msgspec.json.encode(config)
        return path

    def _service(self, noun: str, name: str, fields: dict[str, Any], *, stop_order: int) -> list[ChildSpec]:
        path = self._config_file(Role(noun), name, fields)
        command = [sys.executable, "-m", f"services.{noun}", "--config", str(path)]
        return [ChildSpec(name=name, role=noun, command=command, presences=[name], stop_order=stop_order)]

    def _learning(self) -> dict[str, Any]:
        """Where taggers keep outcomes and length models, over restarts."""
        return {"learning": {"directory": str(self.root / "lengths")}}

    def _ingress(self, index: int) -> list[ChildSpec]:
        options = self.options
        fields: dict[str, Any] = {
            "http": {"host": options.host, "port": options.port, "reuse_port": options.ingresses > 1},
            "models": [{"name": options.model, "path": options.model_path}],
        }
        if options.policy:
            fields["dispatch"] = {"policy": options.policy}
        if options.keys:
            fields["http"]["keys_file"] = str(Path(options.keys).absolute())
        return self._service("ingress", f"ingress-{index}", merged(fields, options.ingress), stop_order=1)

    def _coordinator(self) -> list[ChildSpec]:
        options = self.options
        fields: dict[str, Any] = {}
        if options.provision:
            bounds = {"instances_min": options.instances_first(), "instances_max": options.instances_bound()}
            fields["provisioning"] = {"strategy": options.provision, "parameters": bounds}
        return self._service("coordinator", "coordinator-0", merged(fields, options.coordinator), stop_order=3)

    def _predictor(self, index: int) -> list[ChildSpec]:
        fields: dict[str, Any] = {"shard": index, "shards": self.options.predictors}
        files = [name for name in self._named_step_times() if name.endswith(".toml")]
        if files:
            fields["step_times"] = {name: str(Path(name).absolute()) for name in files}
        return self._service("predictor", f"predictor-{index}", fields, stop_order=3)

    def _migrators(self) -> list[ChildSpec]:
        """For every instance there is or may be. They outlive their workers, which drain through them."""
        if not self.options.migrators:
            return []
        return [child for index, names in enumerate(self._migrated()) for child in self._migrator(index, names)]

    def _migrator(self, index: int, instances: list[str]) -> list[ChildSpec]:
        fields = merged({"instances": instances}, self.options.migrator)
        return self._service("migrator", f"migrator-{index}", fields, stop_order=3)

    def _migrated(self) -> list[list[str]]:
        """Instances of each migrator process: those of one worker process; of modelled engines many, unless their
        processes were counted by hand.
        """
        options = self.options
        if options.engine == "vllm":
            return [[f"worker-{index}"] for index in range(options.instances_bound())]
        shares = [*self._modelled_shares(), *[1] * (options.instances_bound() - options.instances_first())]
        names = [instance_names(f"worker-{index}", share) for index, share in enumerate(shares)]
        if options.processes:
            return names
        every = [name for group in names for name in group]
        return [every[first : first + MODELLED_PER_PROCESS] for first in range(0, len(every), MODELLED_PER_PROCESS)]

    def _named_step_times(self) -> list[str]:
        """What workers were told to say of their step times."""
        told = [self.options.worker, *self.options.workers.values()]
        modelled = [fields["modelled"] for fields in told if isinstance(fields.get("modelled"), dict)]
        own = [str(fields.get("coefficients", "")) for fields in modelled]
        return [*(str(fields.get("step_time", "")) for fields in told), *own]

    def _worker_file(self, name: str, fields: dict[str, Any]) -> Path:
        """A worker's configuration: what all are told, and over it what this one is."""
        options = self.options
        told = merged(merged(fields, options.worker), options.workers.get(name, {}))
        return self._config_file(Role.WORKER, name, told)

    def _workers(self) -> list[ChildSpec]:
        if self.options.engine == "vllm":
            return [self._zygote(), *(self._vllm_worker(index) for index in range(self.options.instances_first()))]
        return self._modelled_workers()

    def _spares(self) -> list[ChildSpec]:
        """Workers that provisioning may add, each in a process of its own."""
        options = self.options
        first, bound = options.instances_first(), options.instances_bound()
        if options.engine == "vllm":
            return [self._vllm_worker(index) for index in range(first, bound)]
        after = self._modelled_processes()
        return [self._modelled_worker(after + index, 1) for index in range(bound - first)]

    def _vllm_worker(self, index: int) -> ChildSpec:
        options = self.options
        name = f"worker-{index}"
        core = options.cores[index % len(options.cores)]
        fields = {
            "engine": "vllm",
            "model": options.model,
            "model_path": options.model_path,
            "kv_bytes": VLLM_KV_BYTES,
            "engine_cores": [core],
            "step_time": STEP_TIMES.get(Path(options.model_path).name, ""),
        }
        path = self._worker_file(name, fields)
        return ChildSpec(
            name=name,
            role="worker",
            fork_config=str(path),
            core=core,
            presences=[name],
            after="zygote",
            stop_order=2,
            stop_limit_ms=15_000,
        )

    def _zygote(self) -> ChildSpec:
        command = [sys.executable, "-m", "services.worker.zygote", "--socket", str(self.run_dir / "zygote.sock")]
        return ChildSpec(name="zygote", role="zygote", command=command, stop_order=4)

    def _modelled_processes(self) -> int:
        """Few processes for many engines; one each where single instances shall be stopped."""
        options, count = self.options, self.options.instances_first()
        default = count if options.provision else -(-count // MODELLED_PER_PROCESS)
        return min(count, options.processes or default)

    def _modelled_workers(self) -> list[ChildSpec]:
        return [self._modelled_worker(index, share) for index, share in enumerate(self._modelled_shares())]

    def _modelled_shares(self) -> list[int]:
        """Engines of each worker process."""
        count, processes = self.options.instances_first(), self._modelled_processes()
        return [count // processes + (index < count % processes) for index in range(processes)]

    def _modelled_worker(self, index: int, share: int) -> ChildSpec:
        options = self.options
        name = f"worker-{index}"
        fields = {
            "engine": "modelled",
            "model": options.model,
            "model_path": options.model_path,  # its tokenizer, so that the modelled text can be read
            "instances": share,
        }
        names = instance_names(name, share)
        path = self._worker_file(name, fields)
        command = [sys.executable, "-m", "services.worker", "--config", str(path)]
        return ChildSpec(name=name, role="worker", command=command, presences=names, stop_order=2)


def instance_names(worker: str, share: int) -> list[str]:
    """Instances of a worker process, as WorkerConfig names them."""
    return [worker] if share == 1 else [f"{worker}-{index}" for index in range(share)]


def merged(fields: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``fields`` with ``over`` laid over them, table by table."""
    result = dict(fields)
    for key, value in over.items():
        held = result.get(key)
        result[key] = merged(held, value) if isinstance(held, dict) and isinstance(value, dict) else value
    return result


def _reachable(host: str) -> str:
    return "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
