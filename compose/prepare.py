"""Writes what a compose deployment needs into compose/generated/: passwords, configurations, one worker per GPU or TP
group.

    python compose/prepare.py --gpus 8 --tensor-parallel 2 --model /srv/models/llama
    python compose/prepare.py --cpus 2                        # CPU workers with a model that ships
    python compose/prepare.py --cluster cluster.toml          # any cluster, also of several models (docs/OPERATIONS.md)

Passwords are kept when it runs again, so that a running deployment can be extended; --new-passwords draws new ones.
Everything written is readable by its owner and the containers' users only.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import secrets
import sys
from collections.abc import Container
from pathlib import Path

import msgspec
from millrace.actor.errors import ConfigError
from millrace.cluster.checks import check_spec
from millrace.cluster.model_folders import is_repository, model_folder, with_model_folders
from millrace.cluster.reading import read_cluster
from millrace.cluster.settings import with_cluster_settings
from millrace.cluster.spec import (
    ApiSpec,
    ClusterPolicies,
    ClusterSpec,
    GroupSpec,
    ModelSpec,
    PolicyChoice,
    ServiceSettings,
)
from millrace.cluster.workers import workers_of
from millrace.contracts.catalog import Role
from millrace.policies.provisioning import PROVISIONING_POLICIES
from millrace.policies.trading import TRADING_POLICIES
from millrace.supervision.roles import roles_of
from millrace.supervision.service_fields import shape_of, step_time_files

from compose.containers import SPARE, compose_services, migrator_of, nats_servers, profile_of
from compose.model_mounts import mount_source, not_in_containers
from compose.service_files import METRICS_PORT, bus_fields, nats_file, service_files
from deployment.config_check import check_settings

HERE = Path(__file__).resolve().parent

#: Where everything goes unless --out says otherwise.
GENERATED = HERE / "generated"

#: User of the containers (Dockerfile). Secrets of compose keep the file's own owner and mode.
CONTAINER_UID = 10001

GRAFANA_UID = 472

#: Files that no container mounts.
KEPT_FOR_COMPOSE = ("passwords.json", "workers.yaml", ".env", "provisioner.json")


def main(words: list[str] | None = None) -> int:
    """Writes every file; says what to do next."""
    arguments = _arguments(words)
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    out.chmod(0o700)
    passwords = kept_passwords(out, new=arguments.new_passwords)
    spec: ClusterSpec = arguments.spec
    slots = workers_of(spec)
    workers, spares = [slot.name for slot in slots], [slot.name for slot in slots if slot.spare]
    otlp, servers = "" if arguments.no_traces else "http://otel-collector:4318", nats_servers(spec)
    files: dict[str, str] = {
        **service_files(spec, passwords, otlp=otlp, servers=tuple(f"nats://{host}:4222" for host in servers)),
        **{f"{host}.conf": _nats_file(spec, passwords, host) for host in servers},
        "grafana-password": passwords["grafana"],
        "workers.yaml": json.dumps(compose_services(spec, slots, out), indent=1),  # JSON is YAML
        ".env": _environment(arguments, out),
    }
    if spares:
        files["provisioner.json"] = _provisioner(spares, passwords, arguments)
    for name, text in files.items():
        _write(out / name, text)
    judges = ["judge"] if spec.cascade is not None and spec.cascade.judge_processes else []
    migrators = [migrator_of(worker) for worker in workers]
    _write_targets(out, {"worker": workers, "migrator": migrators, "judge": judges})
    profile = profile_of(spec) + (" --profile cascade" if judges else "")
    env = f"{os.path.relpath(out, HERE)}/.env"
    print(f"compose: {len(workers)} worker(s) prepared in {os.path.relpath(out)}; next:")
    print(f"  cd compose && docker compose --env-file {env} --profile {profile} up -d --build")
    if spares:
        command = f"python -m services.supervisor.compose_host --config {os.path.relpath(out / 'provisioner.json')}"
        print(f"  {command}  # on this host; starts and stops {len(spares)} spare worker(s)")
    return 0


def _arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--gpus", type=int, default=0, help="GPUs of this node; one worker per GPU or TP group")
    kind.add_argument("--cluster", type=Path, metavar="FILE", help="a cluster's TOML file, in place of most options")
    kind.add_argument("--cpus", type=int, default=0, help="CPU workers, one core each")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs per worker")
    parser.add_argument(
        "--model", default="millrace-mini", help="a folder, a model that ships, or owner/name in Hugging Face's cache"
    )
    parser.add_argument("--served-name", default="", help="name under which it is served (default: the folder's)")
    parser.add_argument("--name", default="node", help="cluster name, second token of every subject")
    parser.add_argument("--policy", default="", help="dispatch policy")
    parser.add_argument("--trading", default="", help="move running requests for balance, by this policy")
    parser.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", help="as `millrace up`: worker.max_num_seqs=256"
    )
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
    if wrong := "" if arguments.cluster else _what_is_wrong(arguments):
        parser.error(wrong)
    try:
        arguments.spec = with_model_folders(with_cluster_settings(_spec(arguments), arguments.set))
        check_spec(arguments.spec)
        check_settings(arguments.spec)
    except ConfigError as error:
        parser.error(str(error))
    if wrong := not_for_containers(arguments.spec):
        parser.error(wrong)
    return arguments


def _spec(arguments: argparse.Namespace) -> ClusterSpec:
    """The cluster that the options, or the file, describe.

    Raises:
        ConfigError: naming the field.
    """
    if arguments.cluster:
        return read_cluster(arguments.cluster)
    group = GroupSpec(
        count=(arguments.gpus // arguments.tensor_parallel or arguments.cpus) - arguments.spares,
        spares=arguments.spares,
        device="gpu" if arguments.gpus else "cpu",
        tensor_parallel=arguments.tensor_parallel,
    )
    roles = roles_of(arguments.roles)
    return ClusterSpec(
        name=arguments.name,
        models=[ModelSpec(name=_served(arguments), path=str(model_folder(arguments.model)), groups=[group])],
        policies=ClusterPolicies(
            dispatch=PolicyChoice(name=arguments.policy),
            provisioning=PolicyChoice(name=arguments.provision),
            trading=PolicyChoice(name=arguments.trading),
        ),
        settings=ServiceSettings(coordinator={"roles": roles} if roles else {}),
        api=ApiSpec(keys=str(arguments.keys.resolve()) if arguments.keys else ""),
    )


def not_for_containers(spec: ClusterSpec, *, several: Container[str] = ()) -> str:
    """The first field of a specification that containers cannot have, with the reason; empty for none.

    Args:
        several: Services of which there may be more than one.
    """
    for name, count in msgspec.structs.asdict(spec.services).items():
        if count != 1 and name not in ("hosted_instances_max", *several):
            return f"services.{name}: {count}; containers are made for one of each such service, and migrators"
    if spec.extra_services:
        name = spec.extra_services[0].name
        return f"extra_services: {name}; the images hold the services of this repository only"
    if len({group.device == "cpu" for model in spec.models for group in model.groups}) > 1:
        return "models[].groups[].device: GPUs and CPUs in one deployment; the worker's image is built for one of them"
    if spec.cascade is not None and spec.cascade.sample:
        return "cascade.sample: containers do not plan from files of this machine; millrace plan --apply does"
    if spec.cascade is not None and spec.cascade.judge_processes > 1:
        return f"cascade.judges: {spec.cascade.judges}; containers are made for one"
    if files := step_time_files(spec):
        return f"step_time: {next(iter(files))} is a file of this machine; name a set that ships"
    if len({slot.model.name for slot in workers_of(spec) if slot.spare}) > 1:
        return "models[].groups[].spares: of one model only; the provisioner beside compose serves one"
    if spec.api.keys and not Path(spec.api.keys).is_file():
        return f"api.keys: {spec.api.keys}: no such file"
    if spec.api.ssl_certfile:
        return "api.ssl_certfile: containers speak plain HTTP; put a proxy with TLS before the published port"
    if spec.nats.tls:
        return "nats.tls: containers speak plain NATS in a network of their own; leave it out"
    return next(filter(None, map(not_in_containers, spec.models)), "")


def _what_is_wrong(arguments: argparse.Namespace) -> str:
    """Return an error that would otherwise show only minutes later, in a container; empty for none."""
    if min(arguments.gpus, arguments.cpus) < 0 or arguments.gpus + arguments.cpus < 1 or arguments.tensor_parallel < 1:
        return "--gpus, --cpus and --tensor-parallel are counts of at least 1"
    if not 0 <= arguments.spares < (arguments.gpus // arguments.tensor_parallel or arguments.cpus):
        return f"--spares {arguments.spares}: at least one worker must run from the start"
    if arguments.provision not in ("", *PROVISIONING_POLICIES.names):
        return f"--provision {arguments.provision}: one of {', '.join(PROVISIONING_POLICIES.names)}"
    if arguments.trading not in ("", *TRADING_POLICIES.names):
        return f"--trading {arguments.trading}: one of {', '.join(TRADING_POLICIES.names)}"
    if arguments.cpus and arguments.tensor_parallel > 1:
        return "--tensor-parallel splits an engine over GPUs; CPU workers have one core each"
    if arguments.gpus % arguments.tensor_parallel:
        return f"--gpus {arguments.gpus} cannot be split into groups of {arguments.tensor_parallel}"
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


def kept_passwords(out: Path, *, new: bool) -> dict[str, str]:
    """Passwords of the roles and of Grafana: those that lie in the folder, drawn where there are none."""
    file = out / "passwords.json"
    known: dict[str, str] = json.loads(file.read_text()) if file.is_file() and not new else {}
    # Letters and digits only: one that begins with a dash would be taken for an option after `--password`.
    drawn = {name: known.get(name) or secrets.token_hex(24) for name in (*Role, "grafana")}
    _write(file, json.dumps({str(name): value for name, value in drawn.items()}))
    return {str(name): value for name, value in drawn.items()}


def _nats_file(spec: ClusterSpec, passwords: dict[str, str], host: str) -> str:
    others = [f"{other}:6222" for other in nats_servers(spec) if other != host]
    return (
        nats_file(spec, passwords, name=host, routes=("0.0.0.0:6222", *others))
        if others
        else nats_file(spec, passwords)
    )


def _provisioner(spares: list[str], passwords: dict[str, str], arguments: argparse.Namespace) -> str:
    """It runs on the host: beside docker, and before the bus's port there."""
    out = arguments.out.resolve()
    ports = nats_servers(arguments.spec).values()
    servers = tuple(f"nats://127.0.0.1:{os.environ.get(variable, default)}" for variable, default in ports)
    bus = bus_fields(Role.SUPERVISOR, passwords, arguments.spec.name, servers=servers)
    profile = profile_of(arguments.spec)  # of what the spare ones depend on
    compose = ["docker", "compose", "--env-file", str(out / ".env"), "--profile", profile, "--profile", SPARE]
    slots = [slot for slot in workers_of(arguments.spec) if slot.spare]
    shapes = {slot.name: shape_of(slot.group) for slot in slots}
    fields = {"name": "provisioner-0", "model": slots[0].model.name, "services": spares, "shapes": shapes}
    return json.dumps({**fields, "compose": compose, "bus": bus}, indent=1)


def _served(arguments: argparse.Namespace) -> str:
    named = arguments.model if is_repository(arguments.model) else model_folder(arguments.model).name
    return str(arguments.served_name or named)


def _workers(arguments: argparse.Namespace) -> list[str]:
    return [f"worker-{index}" for index in range(arguments.gpus // arguments.tensor_parallel or arguments.cpus)]


def _environment(arguments: argparse.Namespace, out: Path) -> str:
    spec: ClusterSpec = arguments.spec
    lines = [
        f"COMPOSE_FILE={HERE / 'compose.yaml'}:{out / 'workers.yaml'}",
        f"MILLRACE_GENERATED={out}",
        f"MILLRACE_MODEL_DIR={mount_source(spec.models[0])}",
        f"MILLRACE_ENGINE={profile_of(spec)}",
    ]
    lines += [f"MILLRACE_PORT={spec.api.port}"] if arguments.cluster else []
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


def _write_targets(out: Path, hosts: dict[str, list[str]]) -> None:
    """Prometheus watches these files. They hold no secret, and its user is another one.

    Args:
        out: Folder of the generated files.
        hosts: Containers by role, besides those that every deployment has.
    """
    folder = out / "targets"
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)
    services = ("ingress", "tagger", "predictor", "coordinator")
    for role, names in ({role: [role] for role in services} | hosts).items():
        groups = [{"targets": [f"{name}:{METRICS_PORT}"], "labels": {"role": role}} for name in names]
        (folder / f"{role}.json").write_text(json.dumps(groups, indent=1))
        (folder / f"{role}.json").chmod(0o644)


if __name__ == "__main__":
    sys.exit(main())
