"""Stamp without which a figure is worth nothing: machine, versions, commit."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path


def stamp() -> str:
    """One line: date, processor, cores, memory, Python, commit (with ``+`` where the tree differs from it)."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    today = datetime.datetime.now(datetime.UTC).date()
    return (
        f"{today}; {_processor()}, {len(os.sched_getaffinity(0))} cores, {memory_gib:.0f} GiB; "
        f"Python {platform.python_version()}; commit {_commit()}"
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str:
    root = Path(__file__).resolve().parent.parent
    try:
        commit = _git(root, "rev-parse", "--short", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("+" if changed else "")


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
