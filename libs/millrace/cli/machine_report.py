"""Assessment of a machine for Millrace, from its facts. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum

import msgspec

from millrace.cli.machine_probes import MachineFacts

GIB = 1024**3

#: Versions of vLLM that pyproject.toml allows, and what of Millrace works with each.
VLLM_KNOWN = {
    "0.32": "all of Millrace runs with it",
    "0.33": "its source has all that Millrace uses; nothing was run with it",
}
#: A vLLM engine of the smallest model that ships takes about this much on a CPU; the services together half of it.
ENGINE_BYTES = int(1.5 * GIB)

#: A service without an engine takes less than half of it.
SERVICE_BYTES = GIB // 4

#: Logs, traces and JetStream of a day with the models that ship stay below this.
DISK_BYTES_MIN = GIB

#: Of vLLM on a CPU: one core per engine, no more than this by default.
CPU_ENGINES_MAX = 4


#: A clock that is slewed keeps the difference of the system's two clocks; one that was set has changed it by more.
CLOCK_STEP_S = 1.0

#: Of the API, by default.
API_PORT = 8000


class Level(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    NOTE = "note"  # works; something could be better, or is not there
    MISSING = "missing"  # Millrace cannot run without it


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the report."""

    level: Level
    subject: str
    text: str


class MachineDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Default behaviour of Millrace on this machine.

    Attributes:
        engine: ``vllm on GPU``, ``vllm on CPU`` or ``modelled``.
        copiers: Ways to move KV between engines of this machine, in the order of preference.
    """

    engine: str
    engines: int
    copiers: list[str]
    why: str


def findings(facts: MachineFacts) -> list[Finding]:
    """Every finding, in the order in which they are shown."""
    return [*_needed(facts), *_engine(facts), *_moving(facts), *_surroundings(facts)]


def outlook(facts: MachineFacts) -> MachineDefaults:
    """Derive the default behaviour from the facts."""
    if facts.vllm and facts.vllm_build == "cuda" and facts.gpus:
        copiers = ["nixl"] if facts.nixl else []
        why = "one engine per GPU (compose/prepare.py --gpus)"
        return MachineDefaults(engine="vllm on GPU", engines=len(facts.gpus), copiers=copiers, why=why)
    if facts.vllm:
        room = max(1, facts.memory_bytes // ENGINE_BYTES)
        engines = int(min(facts.cores, CPU_ENGINES_MAX, room))
        why = f"`millrace up`: one engine per core, at most {CPU_ENGINES_MAX}"
        return MachineDefaults(engine="vllm on CPU", engines=engines, copiers=["shared_memory"], why=why)
    if _services_only(facts):
        why = "vLLM is in the image of workers; in theirs this tells about engines"
        return MachineDefaults(engine="none", engines=0, copiers=[], why=why)
    why = "vLLM is not installed; `millrace up --engine modelled`"
    return MachineDefaults(engine="modelled", engines=8, copiers=["modelled"], why=why)


def _services_only(facts: MachineFacts) -> bool:
    """Whether this is a container of the image without vLLM."""
    return facts.container and not facts.vllm and not facts.repository


def _needed(facts: MachineFacts) -> Iterator[Finding]:
    yield _found(bool(facts.nats_server), "nats-server", facts.nats_server, "not there; `./task setup` installs it")
    compiled = ", ".join(facts.native)
    yield _found(
        "kvcopy" in facts.native, "compiled modules", compiled, "not there; `./task setup` builds them with g++"
    )
    disk = f"{facts.disk_free_bytes / GIB:.1f} GiB free"
    yield _found(facts.disk_free_bytes >= DISK_BYTES_MIN, "disk", disk, f"{disk}; at least 1 GiB is needed")
    whose = ", the limit of the control group" if facts.memory_limited else ""
    memory = f"{facts.memory_bytes / GIB:.1f} GiB{whose}, {facts.memory_used_bytes / GIB:.1f} in use"
    least = SERVICE_BYTES if _services_only(facts) else ENGINE_BYTES
    yield _found(facts.memory_bytes >= least, "memory", memory, f"{memory}; at least {least / GIB} GiB is needed")
    if facts.oom_kills:
        text = f"the kernel killed {facts.oom_kills} process(es) of this control group for it"
        yield _noted(False, "memory limit", text)
    if abs(facts.clock_step_s) >= CLOCK_STEP_S:
        way = "forward" if facts.clock_step_s > 0 else "back"
        text = f"set {way} by {abs(facts.clock_step_s):,.0f} s since the cluster began; its processes keep their time"
        yield _noted(False, "clock", text)
    yield Finding(level=Level.OK, subject="cores", text=str(facts.cores))
    yield Finding(level=Level.OK, subject="Python", text=facts.python)


def _found(there: bool, subject: str, text: str, otherwise: str) -> Finding:
    level = Level.OK if there else Level.MISSING
    return Finding(level=level, subject=subject, text=text if there else otherwise)


def _noted(fine: bool, subject: str, text: str) -> Finding:
    return Finding(level=Level.OK if fine else Level.NOTE, subject=subject, text=text)


def _engine(facts: MachineFacts) -> Iterator[Finding]:
    gpus = ", ".join(f"{gpu.name} ({gpu.memory_mib:,} MiB)" for gpu in facts.gpus)
    yield _noted(True, "GPUs", f"{gpus}; driver {facts.driver}" if gpus else "none")
    for line in facts.gpu_links:
        yield _noted(True, "links", " ".join(line.split()))
    if _services_only(facts):
        yield _noted(True, "vLLM", "not in this image, which runs services without an engine")
    elif not facts.vllm:
        yield _noted(False, "vLLM", "not installed: modelled engines only; `./task setup` installs it")
    elif facts.gpus and facts.vllm_build != "cuda":
        yield _noted(False, "vLLM", f"{facts.vllm}, the build for CPUs, although there are GPUs: they stay unused")
    elif not facts.gpus and facts.vllm_build == "cuda":
        yield _noted(False, "vLLM", f"{facts.vllm}, the build for GPUs, of which none is in sight")
    else:
        known = VLLM_KNOWN.get(".".join(facts.vllm.split(".")[:2]))
        other = f"known are {' and '.join(VLLM_KNOWN)}, `./task check:vllm {facts.vllm}` tells what is missing"
        build = "GPUs" if facts.vllm_build == "cuda" else "CPUs"
        yield _noted(known is not None, "vLLM", f"{facts.vllm} for {build}; {known or other}")


def _moving(facts: MachineFacts) -> Iterator[Finding]:
    backends = ", ".join(facts.nixl_backends) or "no backends found"
    yield _noted(
        bool(facts.nixl) or _services_only(facts),
        "NIXL",
        f"{facts.nixl}: {backends}" if facts.nixl else "not installed",
    )
    yield _noted(True, "RDMA devices", ", ".join(facts.rdma_devices) or "none")


def _surroundings(facts: MachineFacts) -> Iterator[Finding]:
    where = "in a container" if facts.container else "not in a container"
    spaces = f"{facts.ipc_namespace or 'ipc unknown'}, {facts.pid_namespace or 'pid unknown'}"
    text = f"{where}; {spaces}"
    if facts.container and facts.gpus:
        text += "; CUDA IPC needs the same two in all workers of a node (compose/README.md)"
    yield _noted(True, "namespaces", text)
    yield _noted(facts.shm_bytes >= 64 * 1024**2, "/dev/shm", f"{facts.shm_bytes / GIB:.2f} GiB")
    locked = facts.memlock_bytes
    unlimited = "unlimited" if locked < 0 else f"{locked / 1024**2:.0f} MiB"
    short = bool(facts.gpus or facts.rdma_devices) and 0 <= locked < GIB
    yield _noted(not short, "locked memory", unlimited + ("; GPUs and RDMA want it unlimited" if short else ""))
    yield _noted(not facts.ports_taken, "ports", _ports(facts.ports_taken))


def _ports(taken: Sequence[int]) -> str:
    """Only the API's port is asked for by number; `up` takes free ones for the others."""
    if not taken:
        return "the default ones are free"
    others = [port for port in taken if port != API_PORT]
    told = [f"{API_PORT} (API) is in use: `millrace up --port N` takes another"] if API_PORT in taken else []
    told += [f"{', '.join(map(str, others))} in use: `millrace up` takes free ones by itself"] if others else []
    return "; ".join(told)
