"""Checks before a cluster is started: nothing of it runs already, ports are free, engine and model are there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.util
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from millrace.actor.bus_tls import bus_context
from millrace.actor.errors import ConfigError
from millrace.cluster.checks import check_spec
from millrace.cluster.model_folders import with_model_folders
from millrace.cluster.model_parsers import folder_json
from millrace.cluster.spec import ClusterSpec, EngineName, ModelSpec, NatsSpec, PageSpec
from millrace.http.certificate import Certificate
from millrace.supervision.cluster_folder import command

#: Ports for metrics that must be free in a row; a cluster of more processes takes those after them, free or not.
METRICS_PORTS = 64

#: Ports that are tried for nats-server where its own is taken.
PORT_TRIES = 50

#: Folder of vLLM's sockets below the cluster's ``run``.
SOCKETS = "ipc"

#: Sockets that are younger are left alone, seconds.
SOCKET_AGE_S = 2.0

#: Folder of JetStream's files below the cluster's.
STORE = "jetstream"

#: Where it lies in memory, and the room that must be there. Plans and registrations are some hundred KB.
MEMORY = Path("/dev/shm")
STORE_BYTES_MIN = 64 * 1024 * 1024

#: Names of folders outside of the cluster's begin so.
ELSEWHERE = "millrace-"

#: A socket's path has 107 bytes at most, of which vLLM takes 37 for a slash and a UUID.
SOCKET_FOLDER_BYTES_MAX = 107 - 37


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
            raise AlreadyRunning(_running_text(directory)) from None
        yield


@contextlib.contextmanager
def socket_folder(directory: Path) -> Iterator[str]:
    """A folder for the sockets of vLLM's processes, gone at the end: each engine makes three and leaves them.

    It is the cluster's own, unless its path is too long for a socket's; then one of the system's temporary folder.
    """
    folder = (directory / "run" / SOCKETS).absolute()
    if len(os.fsencode(folder)) > SOCKET_FOLDER_BYTES_MAX:
        with _elsewhere(folder, Path(tempfile.gettempdir())) as made:
            yield str(made)
        return
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def store_folder(directory: Path) -> Iterator[None]:
    """JetStream's folder in memory, gone at the end: a full disk then stops no write of a plan or a registration.

    Nothing in it is needed after the cluster has ended. Where there is no memory for it, it lies on the disk.
    """
    link = directory / STORE
    if (
        (link.is_dir() and not link.is_symlink())
        or not MEMORY.is_dir()
        or shutil.disk_usage(MEMORY).free < STORE_BYTES_MIN
    ):
        yield
        return
    with _elsewhere(link, MEMORY):
        yield


@contextlib.contextmanager
def _elsewhere(link: Path, parent: Path) -> Iterator[Path]:
    """A folder of one's own in ``parent``, to which ``link`` leads, so that the next start finds it."""
    if link.is_symlink():  # of a supervisor that was killed, whose processes are taken over
        made = link.readlink()
    else:
        made = Path(tempfile.mkdtemp(prefix=ELSEWHERE, dir=parent))
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(made)
    try:
        yield made
    finally:
        _clear(link)


def _clear(path: Path) -> None:
    """Removes a folder, and where it is a link what it leads to."""
    if path.is_symlink():
        target = path.readlink()
        path.unlink()
        if not target.name.startswith(ELSEWHERE):
            return
        path = target
    shutil.rmtree(path, ignore_errors=True)


def clear_sockets(folder: Path, now_s: float) -> None:
    """Removes sockets that nobody listens to, as a killed engine leaves them. One that was made just now may be
    listened to in a moment.
    """
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            if path.is_socket() and now_s - path.lstat().st_mtime > SOCKET_AGE_S and not _is_heard(path):
                path.unlink()


def _is_heard(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            return True  # it listens and is busy, or cannot be asked
    return True


def last_end(directory: Path) -> str:
    """Note on the previous cluster where it was not stopped in order; empty where it was, or there was none."""
    try:
        known = msgspec.json.decode((directory / "run" / "cluster.json").read_bytes(), type=dict[str, object])
        started_s = int(str(known["started_ns"])) / 1e9
        began = datetime.fromtimestamp(started_s, tz=UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        which = f"the cluster that was started here at {began} (supervisor pid {known['supervisor_pid']})"
    except (OSError, msgspec.DecodeError, KeyError, ValueError):
        return ""
    return (
        f"note: {which} was not stopped in order: its supervisor was killed, or the machine went down. Its\n"
        f"processes ended with it and open requests with an error; {directory / 'logs'} has what they said last."
    )


def clear_leftovers(directory: Path) -> None:
    """Removes what an earlier cluster left that must not be believed: plans, leases, registrations, sockets."""
    _clear(directory / STORE)
    _clear(directory / "run" / SOCKETS)
    for name in ("cluster.json", "banner.txt", "fork.sock", "processes.json"):
        (directory / "run" / name).unlink(missing_ok=True)


def check(spec: ClusterSpec, free: Callable[[str, int], bool] | None = None) -> ClusterSpec:
    """Whether what was asked for can be had; returns it with the folders of its models.

    Args:
        free: Whether nobody listens on a host's port; asks the system by default.

    Raises:
        ConfigError: with what is missing and how to get it.
    """
    check_spec(spec)
    spec = with_model_folders(spec)
    groups = [group for model in spec.models for group in model.groups]
    for group in groups:
        if group.python and not os.access(group.python, os.X_OK):
            raise ConfigError(f"models[].groups[].python: no program {group.python}")
    _check_models(spec.models)
    if (
        any(group.engine is EngineName.VLLM and not group.python for group in groups)
        and importlib.util.find_spec("vllm") is None
    ):
        raise ConfigError("vLLM is not installed; `./task setup` installs it, or use --engine modelled")
    on_gpus = (group for group in groups if group.device != "cpu")
    if sum(group.size + group.spares for group in on_gpus) > 1:
        raise ConfigError("several GPU engines on one machine need containers: see compose/prepare.py --cluster FILE")
    if spec.cascade is not None and spec.cascade.sample and not Path(spec.cascade.sample).is_file():
        raise ConfigError(f"cascade.sample: no file {spec.cascade.sample}")
    if spec.api.keys and not Path(spec.api.keys).is_file():
        raise ConfigError(f"no key file {spec.api.keys}; `millrace keys add NAME` makes one")
    _check_certificate(spec)
    bus_context(spec.nats.tls)
    if not (free or _free)(spec.api.host, spec.api.port):
        raise ConfigError(f"port {spec.api.port} is taken by another program; choose one with --port")
    return spec


def _check_models(models: Iterable[ModelSpec]) -> None:
    """Whether ingress and engines can read what they read first."""
    for index, model in enumerate(models):
        folder = Path(model.path)
        try:
            _ = folder_json(folder / "config.json"), folder_json(folder / "tokenizer_config.json")
            text = (folder / "tokenizer.json").read_bytes().strip()
        except (ConfigError, OSError) as error:
            raise ConfigError(f"models[{index}].path: {error}; a complete folder of a model is needed") from None
        if text[:1] + text[-1:] != b"{}":  # of some MB: not parsed here
            raise ConfigError(f"models[{index}].path: {folder}/tokenizer.json is no JSON object, or a part of one")


def _check_certificate(spec: ClusterSpec) -> None:
    certfile, keyfile = spec.api.ssl_certfile, spec.api.ssl_keyfile
    if not certfile and not keyfile:
        return
    if not certfile or not keyfile:
        raise ConfigError("api.ssl_certfile and api.ssl_keyfile go together")
    try:
        Certificate(certfile, keyfile)
    except OSError as error:
        raise ConfigError(f"api.ssl_certfile {certfile}, api.ssl_keyfile {keyfile}: {error}") from None
    if spec.cascade is not None and spec.cascade.judge_processes and "url" not in spec.cascade.parameters:
        raise ConfigError("cascade.parameters.url: a judge asks the API over plain HTTP; name one that speaks it")


@contextlib.contextmanager
def free_ports(spec: ClusterSpec) -> Iterator[ClusterSpec]:
    """The cluster with ports that nobody types replaced where they are taken.

    They are kept from other supervisors of this machine: services listen on them seconds later.
    """

    def free(port: int) -> bool:
        return port != spec.api.port and _free("127.0.0.1", port)

    with contextlib.ExitStack() as held:

        def kept(port: int) -> bool:
            reservation = _reserved(port) if free(port) else None
            return bool(reservation and held.enter_context(reservation))

        nats = _free_nats(spec.nats, kept)
        first, reservation = _first_of_free_range(spec.telemetry.metrics_port, METRICS_PORTS, free)
        held.enter_context(reservation)
        telemetry = msgspec.structs.replace(spec.telemetry, metrics_port=first)
        port = spec.page.port if not spec.page.port or kept(spec.page.port) else _some_port()
        page = PageSpec(host=spec.page.host, port=port)
        yield msgspec.structs.replace(spec, nats=nats, page=page, telemetry=telemetry)


def _free_nats(nats: NatsSpec, free: Callable[[int], bool]) -> NatsSpec:
    """With a port that is free, and those behind it that it needs."""
    for _ in range(PORT_TRIES):
        if all(map(free, nats.ports)):
            return nats
        nats = msgspec.structs.replace(nats, port=_some_port())
    raise ConfigError(f"no {len(nats.ports)} free ports in a row for nats-server")


def _some_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _first_of_free_range(start: int, count: int, free: Callable[[int], bool]) -> tuple[int, socket.socket]:
    """The first port of a free range, and the socket that reserves it while it is open."""
    for first in range(start, start + 2000, count):
        reservation = _reserved(first)
        if reservation is None:
            continue
        if all(map(free, range(first, first + count))):
            return first, reservation
        reservation.close()
    raise ConfigError(f"no {count} free ports in a row from {start} on for metrics")


def _reserved(port: int) -> socket.socket | None:
    """A socket with a name of the port, in Linux's abstract namespace; None where another supervisor holds it."""
    reservation = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        reservation.bind(f"\0millrace-port-{port}")
    except OSError:
        reservation.close()
        return None
    return reservation


def _free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(f"nothing can listen on {host}, port {port}: {error.strerror}") from None
            return False
    return True


def _running_text(directory: Path) -> str:
    try:
        known = msgspec.json.decode((directory / "run" / "cluster.json").read_bytes(), type=dict[str, object])
        where = f" at {known['ingress_url'] or known['nats_url']} (supervisor pid {known['supervisor_pid']})"
    except (OSError, msgspec.DecodeError, KeyError):
        where = ""
    show, stop = (command(verb, directory) for verb in ("status", "down"))
    return f"a cluster is already running here{where}; `{show}` shows it, `{stop}` stops it"
