"""Processes and cores: children that die with their parent, and the core an engine is pinned to."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent ends, however it ends. Linux only; elsewhere nothing.

    The signal follows the *thread* that forked; workers and zygotes fork from their main thread.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


#: Niceness of an engine that computes on a CPU. It never sleeps while it has work, and on a small machine the services
#: share its core: a token, a question or an answer must not wait for the end of the engine's time slice.
ENGINE_NICE = 5


def yield_to_services() -> None:
    """Lets short work of other processes on this core go first. Call on the engine's main thread."""
    os.nice(max(0, ENGINE_NICE - os.nice(0)))


def become_subreaper() -> None:
    """Makes this process the parent of its descendants' orphans, so that killed workers' engines are reaped."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


@contextmanager
def children_on(cores: list[int]) -> Iterator[None]:
    """Processes forked inside run on these cores, and die with this one; this one keeps its own cores."""
    _register_fork_hook()
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


_hooked = False


def _register_fork_hook() -> None:
    """From now on every child forked by this process dies with it. Process-wide by nature, so done once."""
    global _hooked  # noqa: PLW0603 - os.register_at_fork cannot be undone
    if not _hooked:
        os.register_at_fork(after_in_child=die_with_parent)
        _hooked = True
