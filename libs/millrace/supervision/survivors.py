"""The processes of a cluster, written down by its supervisor, so that the next one finds those that outlived it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from millrace.files import replace_file

#: Below the cluster's folder.
FILE = Path("run") / "processes.json"


class WrittenProcess(msgspec.Struct, frozen=True, kw_only=True):
    """One process.

    Attributes:
        pid: Leads a process group.
        created: When (see ``created``): the pid may be another process's later.
        spec: As the supervisor started it.
        retiring: Whether it is not started again.
    """

    pid: int
    created: str
    spec: dict[str, Any]
    retiring: bool = False


def created(pid: int) -> str:
    """Boot of the system, and the ticks since then at which a process was created; empty where none of that pid runs.

    Not its time of day, which Linux computes from that of the boot: it moves when the system's clock is set.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else f"{boot} {fields[19]}"


def write_processes(folder: Path, processes: Iterable[WrittenProcess]) -> None:
    """Replaces what is written down."""
    replace_file(folder / FILE, msgspec.json.encode(list(processes)))


def survivors(folder: Path) -> list[WrittenProcess]:
    """Those that are written down and run."""
    try:
        known = msgspec.json.decode((folder / FILE).read_bytes(), type=list[WrittenProcess])
    except (OSError, msgspec.DecodeError):
        return []
    return [each for each in known if created(each.pid) == each.created]
