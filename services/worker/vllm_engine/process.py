"""Processes and cores: children that die with their parent, and the core an engine is pinned to."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from millrace.actor.child_process import die_with_parent, leave_session

#: How ZeroMQ's own threads are called.
_ZMQ = "ZMQ"


#: Niceness of an engine that computes on a CPU. It never sleeps while it has work, and on a small machine the services
#: share its core: a token, a question or an answer must not wait for the end of the engine's time slice.
ENGINE_NICE = 5


def yield_to_services() -> None:
    """Lets short work of other processes on this core go first. Call on the thread that computes."""
    os.nice(max(0, ENGINE_NICE - os.nice(0)))


def part_threads() -> None:
    """Parts an engine's threads: those that compute yield, those that only carry messages run at once, and on any core
    of the parent's. Otherwise each question and each token waits for the computing thread, whose core they share.

    Call in an engine's own process when all its threads are there; none can be made less nice afterwards.
    """
    if sys.platform != "linux":
        return
    leave_session(ENGINE_NICE)
    carriers = {thread.native_id for thread in threading.enumerate() if thread is not threading.main_thread()}
    cores = os.sched_getaffinity(os.getppid())
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            thread = int(task.name)
            if thread in carriers or (task / "comm").read_text().startswith(_ZMQ):
                os.sched_setaffinity(thread, cores)
            else:
                os.setpriority(os.PRIO_PROCESS, thread, max(ENGINE_NICE, os.getpriority(os.PRIO_PROCESS, thread)))


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
