"""Engines on one core, everything else on another: what a move takes where nobody displaces an engine's steps."""

from __future__ import annotations

import os
from contextlib import suppress

import psutil

from tests.testbed.up_cluster import UpRig


def separate(rig: UpRig) -> int:
    """Pin the threads of all engines to the last core, those of the cluster's other processes and of this one to the
    rest. Processes that begin later inherit the core of their parent.

    Returns:
        Number of engine processes.

    Raises:
        RuntimeError: this process may use one core only.
    """
    *others, last = sorted(os.sched_getaffinity(0))
    if not others:
        raise RuntimeError("two cores are needed")
    engines = 0
    for process in [*rig.processes(), psutil.Process()]:
        with suppress(psutil.Error):
            is_engine = any(word.startswith("VLLM::") for word in process.cmdline())
            pin(process.pid, [last] if is_engine else others)
            engines += is_engine
    return engines


def pin(pid: int, cores: list[int]) -> None:
    """Keep a process's threads on these cores."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)
