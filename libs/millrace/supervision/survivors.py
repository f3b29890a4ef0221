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
        created_s: Its creation (unix time, as the system tells): the pid may be another process's later.
        spec: As the supervisor started it.
        retiring: Whether it is not started again.
    """

    pid: int
    created_s: float
    spec: dict[str, Any]
    retiring: bool = False


def created_s(pid: int) -> float:
    """Creation of a process that runs; 0 where none does."""
    import psutil

    try:
        process = psutil.Process(pid)
        return 0.0 if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.Error:
        return 0.0


def write_processes(folder: Path, processes: Iterable[WrittenProcess]) -> None:
    """Replaces what is written down."""
    replace_file(folder / FILE, msgspec.json.encode(list(processes)))


def survivors(folder: Path) -> list[WrittenProcess]:
    """Those that are written down and run."""
    try:
        known = msgspec.json.decode((folder / FILE).read_bytes(), type=list[WrittenProcess])
    except (OSError, msgspec.DecodeError):
        return []
    return [each for each in known if created_s(each.pid) == each.created_s]
