"""What must hold before a cluster is started: nothing of it runs already, ports are free, the engine and the model
are there.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
from millrace.actor.errors import ConfigError
from millrace.policies.provisioning import PROVISIONING_POLICIES

from services.supervisor.layout import INSTANCES_MAX, UpOptions

PORT_MAX = 65_535


class AlreadyRunning(Exception):
    """A cluster runs in this folder. The text says where, and how to stop it."""


@contextlib.contextmanager
def claim(directory: Path) -> Iterator[None]:
    """Holds the folder for this process.

    Raises:
        AlreadyRunning: another supervisor holds it.
    """
    run = directory / "run"
    run.mkdir(parents=True, exist_ok=True)
    with (run / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AlreadyRunning(_running_text(run)) from None
        yield


def clear_leftovers(directory: Path) -> None:
    """Removes what an earlier cluster left that must not be believed: plans, leases, registrations, sockets."""
    shutil.rmtree(directory / "jetstream", ignore_errors=True)
    for name in ("cluster.json", "banner.txt", "zygote.sock"):
        (directory / "run" / name).unlink(missing_ok=True)


def check(options: UpOptions) -> None:
    """Whether what was asked for can be had.

    Raises:
        ConfigError: with what is missing and how to get it.
    """
    if options.engine not in ("vllm", "modelled"):
        raise ConfigError(f"unknown engine {options.engine!r}: it is vllm or modelled")
    if not 0 <= options.instances <= INSTANCES_MAX:
        raise ConfigError(f"--instances {options.instances}: between 1 and {INSTANCES_MAX}")
    if options.instances_max and not options.instances_first() <= options.instances_max <= INSTANCES_MAX:
        first = options.instances_first()
        raise ConfigError(f"--instances-max {options.instances_max}: between the {first} at start and {INSTANCES_MAX}")
    if options.provision and options.provision not in PROVISIONING_POLICIES:
        raise ConfigError(f"--provision {options.provision}: one of {', '.join(sorted(PROVISIONING_POLICIES))}")
    if options.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ConfigError("vLLM is not installed; `./task setup` installs it, or use --engine modelled")
    if not (Path(options.model_path) / "config.json").is_file():
        raise ConfigError(
            f"no model in {options.model_path}: a folder with config.json, tokenizer and weights is needed"
        )
    if options.keys and not Path(options.keys).is_file():
        raise ConfigError(f"no key file {options.keys}; `millrace keys add NAME` makes one")
    for name, port in (("--port", options.port), ("--nats-port", options.nats_port)):
        if not 1 <= port <= PORT_MAX:
            raise ConfigError(f"{name} {port}: between 1 and {PORT_MAX}")
    if not _free(options.host, options.port):
        raise ConfigError(f"port {options.port} is taken by another program; choose one with --port")


def free_ports(options: UpOptions) -> UpOptions:
    """The options with ports that nobody types replaced where they are taken."""
    return msgspec.structs.replace(
        options,
        nats_port=_this_or_free(options.nats_port),
        nats_monitor_port=_this_or_free(options.nats_monitor_port),
        metrics_port=_first_of_free_range(options.metrics_port, 16),
    )


def _this_or_free(port: int) -> int:
    if _free("127.0.0.1", port):
        return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _first_of_free_range(start: int, count: int) -> int:
    for first in range(start, start + 2000, count):
        if all(_free("127.0.0.1", port) for port in range(first, first + count)):
            return first
    raise ConfigError(f"no {count} free ports in a row from {start} on for metrics")


def _free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _running_text(run: Path) -> str:
    try:
        known = msgspec.json.decode((run / "cluster.json").read_bytes(), type=dict[str, object])
        where = f" at {known['ingress_url']} (supervisor pid {known['supervisor_pid']})"
    except (OSError, msgspec.DecodeError, KeyError):
        where = ""
    return f"a cluster is already running here{where}; `./task status` shows it, `./task down` stops it"
