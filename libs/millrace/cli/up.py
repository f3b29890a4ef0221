"""Starts a cluster on this machine: nats-server, ingress, tagger, coordinator and engines, under one supervisor.

By default it runs as many real vLLM engines as there are cores (at most four) with a model that ships with Millrace,
in the foreground;
Ctrl-C takes everything down. With --detach it goes on in the background; `millrace down` stops it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from millrace.cli.errors import CliError
from millrace.policies.dispatch.loading import SUFFIX, PolicyError, load_policy
from millrace.supervision.roles import roles_of

#: How long --detach waits for the banner: as long as the supervisor itself waits for readiness, and a little more.
DETACHED_WAIT_S = 200.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this verb's options."""
    add = parser.add_argument
    add("--engine", choices=["vllm", "modelled"], default="vllm", help="real engines, or models of them")
    add("--instances", type=int, default=0, help="engines (default: one per core, at most 4; modelled: 8)")
    add("--model", default="millrace-mini", help="a model of models/, or the folder of any other")
    add("--served-name", default="", help="name under which it is served (default: the folder's)")
    add("--host", default="127.0.0.1", help="address of the API")
    add("--port", type=int, default=8000, help="port of the API")
    add("--policy", default="", help="dispatch policy: a name, or a file that ends in .py")
    add("--provision", default="", help="start and stop instances by load: preempt or relief (default: none)")
    add("--instances-max", type=int, default=0, help="with --provision: engines at once (default: twice --instances)")
    add("--processes", type=int, default=0, help="worker processes of modelled engines (default: one per 64)")
    add("--ingresses", type=int, default=1, help="ingress processes that share the port")
    add("--keys", default="", help="file of API keys (`millrace keys`); without it none is asked for")
    add("--otlp", default="", help="OTLP/HTTP endpoint; without it traces go to .millrace/traces")
    add("--trace-sample", type=float, default=1.0, help="share of requests that are traced, 0 to 1")
    add("--log-format", choices=["console", "json"], default="console")
    add("--log-level", choices=["debug", "info", "warning", "error"], default="info")
    add("--nats-port", type=int, default=4222, help="another free one is taken where this is in use")
    add("--dir", default=os.environ.get("MILLRACE_DIR", ".millrace"), help="folder of the cluster's files")
    add("--roles", default="", help="prefill and decode apart: worker-0=prefill,worker-1=decode (default: both)")
    add("--no-migrators", action="store_true", help="running sequences stay where they are")
    add(
        "--worker-set",
        metavar="[NAME=]JSON",
        action="append",
        default=[],
        help="further fields of each worker's configuration, or of the one named (worker-0=...); may be repeated",
    )
    add("--ingress-set", metavar="JSON", default="{}", help="further fields of each ingress's configuration")
    add("--migrator-set", metavar="JSON", default="{}", help="further fields of each migrator's configuration")
    add("--coordinator-set", metavar="JSON", default="{}", help="further fields of the coordinator's configuration")
    add("-d", "--detach", action="store_true", help="return once it is ready")


def run(arguments: argparse.Namespace) -> int:  # noqa: RET503  # execv does not return
    """Hands over to the supervisor."""
    folder = model_folder(arguments.model)
    options = {
        "directory": str(Path(arguments.dir).absolute()),
        "engine": arguments.engine,
        "instances": arguments.instances,
        "model": arguments.served_name or folder.name,
        "model_path": str(folder),
        "policy": _policy(arguments.policy),
        "host": arguments.host,
        "port": arguments.port,
        "nats_port": arguments.nats_port,
        "processes": arguments.processes,
        "ingresses": arguments.ingresses,
        "keys": arguments.keys,
        "otlp": arguments.otlp,
        "trace_sample": arguments.trace_sample,
        "log_format": arguments.log_format,
        "log_level": arguments.log_level,
        "migrators": not arguments.no_migrators,
        "migrator": _table(arguments.migrator_set, "--migrator-set"),
        **worker_settings(arguments.worker_set),
        "ingress": _table(arguments.ingress_set, "--ingress-set"),
        "provision": "" if arguments.provision == "none" else arguments.provision,
        "instances_max": arguments.instances_max,
        "coordinator": _roles(arguments.roles) | _table(arguments.coordinator_set, "--coordinator-set"),
    }
    command = [sys.executable, "-m", "services.supervisor", "--options", json.dumps(options)]
    if arguments.detach:
        return _detach(command, Path(options["directory"]))
    os.execv(command[0], command)


def model_folder(model: str) -> Path:
    """The folder of a model: as given, or by name among those that ship.

    Raises:
        CliError: there is none.
    """
    shipped = Path(__file__).resolve().parents[3] / "models"
    for candidate in (Path(model), shipped / model):
        if (candidate / "config.json").is_file():
            return candidate.resolve()
    names = sorted(path.parent.name for path in shipped.glob("*/config.json"))
    raise CliError(f"no model {model!r}: give a folder with config.json, or one of {', '.join(names) or 'none'}")


def _policy(policy: str) -> str:
    """A name as it is; a file by a path that holds wherever ingress runs.

    Raises:
        CliError: there is no such policy.
    """
    if not policy:
        return policy
    try:
        load_policy(policy)
    except PolicyError as error:
        raise CliError(f"--policy: {error}") from None
    return str(Path(policy).absolute()) if policy.endswith(SUFFIX) else policy


def _roles(text: str) -> dict[str, object]:
    """What the coordinator is told of roles.

    Raises:
        CliError: not a list of INSTANCE=ROLE, or no such role.
    """
    try:
        roles = roles_of(text)
    except ValueError as error:
        raise CliError(f"--roles: {error}") from None
    return {"roles": roles} if roles else {}


def worker_settings(words: Iterable[str]) -> dict[str, dict[str, Any]]:
    """What the supervisor is told of workers: ``worker`` for all of them, ``workers`` by name. Of two words
    about the same the later field wins.

    Raises:
        CliError: neither JSON nor NAME=JSON, or no object.
    """
    every: dict[str, Any] = {}
    single: dict[str, dict[str, Any]] = {}
    for word in words:
        name, equals, text = word.partition("=")
        named = bool(equals) and not word.lstrip().startswith(("{", "["))
        told = single.setdefault(name.strip(), {}) if named else every
        told.update(_table(text if named else word, f"--worker-set {name.strip()}" if named else "--worker-set"))
    return {"worker": every, "workers": single}


def _table(text: str, option: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise CliError(f"{option}: {error}") from None
    if not isinstance(value, dict):
        raise CliError(f"{option}: a JSON object is needed")
    return value


def _detach(command: list[str], directory: Path) -> int:
    (directory / "logs").mkdir(parents=True, exist_ok=True)
    banner = directory / "run" / "banner.txt"
    log = directory / "logs" / "up.log"
    began = time.time()
    # Appended to: where a cluster runs here already, this file is its log, and what starts now will only say so.
    with log.open("ab") as output:
        before = output.tell()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    while time.time() - began < DETACHED_WAIT_S:
        if process.poll() is not None:
            raise CliError(f"it did not start:\n{_since(log, before)}")
        if banner.is_file() and banner.stat().st_mtime >= began:
            print(banner.read_text() + "It runs in the background; `./task down` stops it.")
            return 0
        time.sleep(0.05)
    raise CliError(f"not ready after {DETACHED_WAIT_S:.0f} s; see {log}")


def _since(log: Path, offset: int) -> str:
    return log.read_bytes()[offset:].decode(errors="replace").strip().removeprefix("millrace up: ")
