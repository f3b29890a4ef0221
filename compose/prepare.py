"""Writes what a compose deployment needs into compose/generated/: passwords, configurations, one worker per GPU or TP
group.

    python compose/prepare.py --gpus 8 --tensor-parallel 2 --model /srv/models/llama
    python compose/prepare.py --cpus 2                        # CPU workers with a model that ships

Passwords are kept when it runs again, so that a running deployment can be extended; --new-passwords draws new ones.
Everything written is readable by its owner and the containers' users only.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import secrets
import stat
import sys
from pathlib import Path
from typing import Any

from millrace.contracts.catalog import Role
from millrace.policies.provisioning import PROVISIONING_POLICIES
from millrace.supervision.nats_config import NatsServerOptions, nats_config
from millrace.supervision.roles import roles_of
from millrace.supervision.service_fields import STEP_TIMES

HERE = Path(__file__).resolve().parent

#: Where everything goes unless --out says otherwise.
GENERATED = HERE / "generated"

#: User of the containers (Dockerfile). Secrets of compose keep the file's own owner and mode.
CONTAINER_UID = 10001

GRAFANA_UID = 472

#: Files that no container mounts.
KEPT_FOR_COMPOSE = ("passwords.json", "workers.yaml", ".env", "provisioner.json")

#: Profile of workers that only provisioning starts.
SPARE = "spare"

METRICS_PORT = 9100


def main(words: list[str] | None = None) -> int:
    """Writes every file; says what to do next."""
    arguments = _arguments(words)
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    out.chmod(0o700)
    passwords = _passwords(out, new=arguments.new_passwords)
    workers = _workers(arguments)
    files: dict[str, str] = {
        "nats.conf": _nats(passwords, arguments.cluster),
        "grafana-password": passwords["grafana"],
        "buckets.json": json.dumps(_bus(Role.SUPERVISOR, passwords, arguments.cluster)),
        "tagger.json": _service("tagger-0", Role.TAGGER, passwords, arguments, {}),
        "predictor.json": _service("predictor-0", Role.PREDICTOR, passwords, arguments, {}),
        "coordinator.json": _service("coordinator-0", Role.COORDINATOR, passwords, arguments, _coordinator(arguments)),
        "ingress.json": _service("ingress-0", Role.INGRESS, passwords, arguments, _ingress(arguments)),
        "workers.yaml": json.dumps(_compose(workers, arguments), indent=1),  # JSON is YAML
        ".env": _environment(arguments, out),
    }
    if arguments.keys:
        files["keys.toml"] = arguments.keys.read_text()
    if arguments.spares:
        files["provisioner.json"] = _provisioner(workers[-arguments.spares :], passwords, arguments)
    for worker in workers:
        files[f"{worker}.json"] = _service(worker, Role.WORKER, passwords, arguments, _worker(arguments))
        migrator, fields = migrator_of(worker), {"instances": [worker]}
        files[f"{migrator}.json"] = _service(migrator, Role.MIGRATOR, passwords, arguments, fields)
    for name, text in files.items():
        _write(out / name, text)
    _write_targets(out, workers)
    profile = "gpu" if arguments.gpus else "cpu"
    print(f"compose: {len(workers)} worker(s) prepared in {os.path.relpath(out)}; next:")
    print(
        f"  cd compose && docker compose --env-file {os.path.relpath(out, HERE)}/.env --profile {profile} up -d --build"
    )
    if arguments.spares:
        command = f"python -m services.supervisor.compose_host --config {os.path.relpath(out / 'provisioner.json')}"
        print(f"  {command}  # on this host; starts and stops the last {arguments.spares}")
    return 0


def _arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--gpus", type=int, default=0, help="GPUs of this node; one worker per GPU or TP group")
    kind.add_argument("--cpus", type=int, default=0, help="CPU workers, one core each")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs per worker")
    parser.add_argument("--model", default=str(HERE.parent / "models" / "millrace-mini"), help="folder of the model")
    parser.add_argument("--served-name", default="", help="name under which it is served (default: the folder's)")
    parser.add_argument("--cluster", default="node", help="cluster name, second token of every subject")
    parser.add_argument("--policy", default="", help="dispatch policy")
    parser.add_argument("--worker-set", type=_fields, default={}, metavar="JSON", help="further fields of each worker")
    parser.add_argument(
        "--spares", type=int, default=0, help="of these workers, the last ones start by provisioning only"
    )
    parser.add_argument("--provision", default="", help="provisioning strategy for them: preempt or relief")
    parser.add_argument("--roles", default="", help="prefill and decode apart: worker-0=prefill,worker-1=decode")
    parser.add_argument("--keys", type=Path, help="file of API keys (millrace keys add); without it none is asked for")
    parser.add_argument("--no-traces", action="store_true", help="send no spans to the collector")
    parser.add_argument("--new-passwords", action="store_true")
    parser.add_argument("--out", type=Path, default=GENERATED, help="folder for the files")
    arguments = parser.parse_args(words)
    if wrong := _what_is_wrong(arguments):
        parser.error(wrong)
    return arguments


def _fields(text: str) -> dict[str, Any]:
    fields = json.loads(text)
    if not isinstance(fields, dict):
        raise ValueError("not an object")
    return fields


def _what_is_wrong(arguments: argparse.Namespace) -> str:
    """What would only show minutes later, in a container; empty for nothing."""
    if min(arguments.gpus, arguments.cpus) < 0 or arguments.gpus + arguments.cpus < 1 or arguments.tensor_parallel < 1:
        return "--gpus, --cpus and --tensor-parallel are counts of at least 1"
    if not 0 <= arguments.spares < (arguments.gpus // arguments.tensor_parallel or arguments.cpus):
        return f"--spares {arguments.spares}: at least one worker must run from the start"
    if arguments.provision not in ("", *PROVISIONING_POLICIES):
        return f"--provision {arguments.provision}: one of {', '.join(sorted(PROVISIONING_POLICIES))}"
    if arguments.cpus and arguments.tensor_parallel > 1:
        return "--tensor-parallel splits an engine over GPUs; CPU workers have one core each"
    if arguments.gpus % arguments.tensor_parallel:
        return f"--gpus {arguments.gpus} cannot be split into groups of {arguments.tensor_parallel}"
    model = Path(arguments.model)
    if not (model / "config.json").is_file():
        return f"--model {arguments.model}: no config.json there"
    closed = [file.name for file in model.iterdir() if file.is_file() and not file.stat().st_mode & stat.S_IROTH]
    if closed:
        return f"--model {arguments.model}: the containers' user may not read {closed[0]}; chmod -R o+rX it"
    if arguments.keys and not arguments.keys.is_file():
        return f"--keys {arguments.keys}: no such file"
    return _wrong_roles(arguments)


def _wrong_roles(arguments: argparse.Namespace) -> str:
    """Roles that are none, or of workers that there are not."""
    try:
        names = roles_of(arguments.roles)
    except ValueError as error:
        return f"--roles: {error}"
    workers = _workers(arguments)
    strangers = [name for name in names if not fnmatch.filter(workers, name)]
    return f"--roles: {strangers[0]} is none of {', '.join(workers)}" if strangers else ""


def _passwords(out: Path, *, new: bool) -> dict[str, str]:
    file = out / "passwords.json"
    known: dict[str, str] = json.loads(file.read_text()) if file.is_file() and not new else {}
    # Letters and digits only: one that begins with a dash would be taken for an option after `--password`.
    drawn = {name: known.get(name) or secrets.token_hex(24) for name in (*Role, "grafana")}
    _write(file, json.dumps({str(name): value for name, value in drawn.items()}))
    return {str(name): value for name, value in drawn.items()}


def _nats(passwords: dict[str, str], cluster: str) -> str:
    options = NatsServerOptions(cluster=cluster, host="0.0.0.0", monitor_port=8222, store_dir="/data")
    return nats_config(options, {role: passwords[role] for role in Role})


def _bus(role: Role, passwords: dict[str, str], cluster: str) -> dict[str, Any]:
    return {"cluster": cluster, "servers": ["nats://nats:4222"], "user": str(role), "password": passwords[role]}


def _service(
    name: str, role: Role, passwords: dict[str, str], arguments: argparse.Namespace, fields: dict[str, Any]
) -> str:
    telemetry = {
        "log_format": "json",
        "otlp_endpoint": "" if arguments.no_traces else "http://otel-collector:4318",
        "metrics_port": METRICS_PORT,
        "metrics_host": "0.0.0.0",
    }
    bus = _bus(role, passwords, arguments.cluster)
    return json.dumps({"name": name, "bus": bus, "telemetry": telemetry, **fields}, indent=1)


def _ingress(arguments: argparse.Namespace) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "http": {"host": "0.0.0.0", "port": 8000, "url": "http://ingress:8000"},
        "models": [{"name": _served(arguments), "path": "/model"}],
    }
    if arguments.keys:
        fields["http"]["keys_file"] = "/run/secrets/keys.toml"
    if arguments.policy:
        fields["dispatch"] = {"policy": arguments.policy}
    return fields


def _worker(arguments: argparse.Namespace) -> dict[str, Any]:
    fields: dict[str, Any] = {"engine": "vllm", "model": _served(arguments), "model_path": "/model"}
    fields["migration"] = {"socket_folder": "/kv"}
    if arguments.gpus:
        fields |= {"tensor_parallel_size": arguments.tensor_parallel, "block_size": 16}
    else:
        fields["kv_bytes"] = 256 * 1024 * 1024
        fields["step_time"] = STEP_TIMES.get(Path(arguments.model).resolve().name, "")
    return {**fields, **arguments.worker_set}


def _coordinator(arguments: argparse.Namespace) -> dict[str, Any]:
    fields: dict[str, Any] = {"roles": roles_of(arguments.roles)}
    if arguments.provision in ("", "none"):
        return fields
    workers = len(_workers(arguments))
    bounds = {"instances_min": workers - arguments.spares, "instances_max": workers}
    return fields | {"provisioning": {"strategy": arguments.provision, "parameters": bounds}}


def _provisioner(spares: list[str], passwords: dict[str, str], arguments: argparse.Namespace) -> str:
    """It runs on the host: beside docker, and before the bus's port there."""
    out = arguments.out.resolve()
    port = os.environ.get("MILLRACE_NATS_PORT", "4222")
    bus = _bus(Role.SUPERVISOR, passwords, arguments.cluster) | {"servers": [f"nats://127.0.0.1:{port}"]}
    profile = "gpu" if arguments.gpus else "cpu"  # of what the spare ones depend on
    compose = ["docker", "compose", "--env-file", str(out / ".env"), "--profile", profile, "--profile", SPARE]
    fields = {"name": "provisioner-0", "model": _served(arguments), "compose": compose, "services": spares}
    return json.dumps({**fields, "bus": bus}, indent=1)


def _served(arguments: argparse.Namespace) -> str:
    return str(arguments.served_name or Path(arguments.model).resolve().name)


def _workers(arguments: argparse.Namespace) -> list[str]:
    return [f"worker-{index}" for index in range(arguments.gpus // arguments.tensor_parallel or arguments.cpus)]


def _compose(workers: list[str], arguments: argparse.Namespace) -> dict[str, Any]:
    services = {worker: _compose_worker(worker, index, arguments) for index, worker in enumerate(workers)}
    services |= {migrator_of(worker): _compose_migrator(worker, arguments) for worker in workers}
    names = [f"{service}.json" for service in services]
    if arguments.keys:
        names.append("keys.toml")
        services["ingress"] = {"secrets": ["keys.toml"]}
    return {"services": services, "secrets": {name: {"file": str(arguments.out.resolve() / name)} for name in names}}


def _compose_worker(worker: str, index: int, arguments: argparse.Namespace) -> dict[str, Any]:
    service: dict[str, Any] = {
        "extends": {"file": str(HERE / "worker.yaml"), "service": "worker"},
        "command": ["services.worker", "--config", f"/run/secrets/{worker}.json"],
        "secrets": [f"{worker}.json"],
        "depends_on": {"buckets": {"condition": "service_completed_successfully"}},
        "profiles": ["gpu" if arguments.gpus else "cpu"],
    }
    if index >= len(_workers(arguments)) - arguments.spares:
        # Whether it runs is for the provisioner to say; docker must not start again what it has stopped.
        service |= {"profiles": [SPARE], "restart": "no"}
    if not arguments.gpus:
        core = sorted(os.sched_getaffinity(0))[index % len(os.sched_getaffinity(0))]
        bounds = {"limits": {"cpus": "1", "memory": "6g"}, "reservations": {"cpus": "0.5", "memory": "1g"}}
        return service | {"cpuset": str(core), "deploy": {"resources": bounds}}
    width = arguments.tensor_parallel
    devices = [str(device) for device in range(index * width, (index + 1) * width)]
    reservation = {"driver": "nvidia", "device_ids": devices, "capabilities": ["gpu"]}
    # CUDA and NCCL lock host memory that the GPU reads directly.
    return service | {
        "deploy": {"resources": {"reservations": {"devices": [reservation]}}},
        "ulimits": {"memlock": -1},
    }


def migrator_of(worker: str) -> str:
    """Name of a worker's migrator."""
    return f"migrator-{worker.removeprefix('worker-')}"


def _compose_migrator(worker: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Also of a spare worker: it waits for it to be started."""
    migrator = migrator_of(worker)
    return {
        "extends": {"file": str(HERE / "worker.yaml"), "service": "migrator"},
        "command": ["services.migrator", "--config", f"/run/secrets/{migrator}.json"],
        "secrets": [f"{migrator}.json"],
        "depends_on": {"buckets": {"condition": "service_completed_successfully"}},
        "profiles": ["gpu" if arguments.gpus else "cpu"],
    }


def _environment(arguments: argparse.Namespace, out: Path) -> str:
    engine = "gpu" if arguments.gpus else "cpu"
    lines = [
        f"COMPOSE_FILE={HERE / 'compose.yaml'}:{out / 'workers.yaml'}",
        f"MILLRACE_GENERATED={out}",
        f"MILLRACE_MODEL_DIR={Path(arguments.model).resolve()}",
        f"MILLRACE_ENGINE={engine}",
    ]
    return "\n".join(lines) + "\n"


def _write(path: Path, text: str) -> None:
    """Writes one file for those who need it: compose and its user alone, Grafana's user, or the containers' user."""
    path.write_text(text)
    if path.name in KEPT_FOR_COMPOSE:
        path.chmod(0o600)
    elif os.geteuid() == 0:
        path.chmod(0o400)
        user = GRAFANA_UID if path.name == "grafana-password" else CONTAINER_UID
        os.chown(path, user, user)
    else:
        # Without root no file can be given away, so "others" must be let in. They are the containers' users only: the
        # folder lets nobody else through.
        path.chmod(0o644)


def _write_targets(out: Path, workers: list[str]) -> None:
    """Prometheus watches these files. They hold no secret, and its user is another one."""
    folder = out / "targets"
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)
    services = ("ingress", "tagger", "predictor", "coordinator")
    hosts = {role: [role] for role in services} | {"worker": workers, "migrator": [migrator_of(w) for w in workers]}
    for role, names in hosts.items():
        groups = [{"targets": [f"{name}:{METRICS_PORT}"], "labels": {"role": role}} for name in names]
        (folder / f"{role}.json").write_text(json.dumps(groups, indent=1))
        (folder / f"{role}.json").chmod(0o644)


if __name__ == "__main__":
    sys.exit(main())
