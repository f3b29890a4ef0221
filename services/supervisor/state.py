"""One child as the supervisor sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from services.supervisor.config import ChildSpec


class ChildState(StrEnum):
    """State of a child process."""

    WAITING = "waiting"  # for its first start
    STARTING = "starting"  # the process runs or is being started; not all of its actors have shown presence
    READY = "ready"
    BACKING_OFF = "backing_off"  # it ended; a timer will start it again
    STOPPING = "stopping"
    STOPPED = "stopped"
    RETIRING = "retiring"  # it drains; once its process has ended the child is forgotten


@dataclass
class Child:
    """A child and its history.

    Attributes:
        pid: 0 while no process runs.
        started_ns: When the present process was started.
        ready_ns: When the present process became ready; 0 before.
        failures: Ends in a row without a healthy spell between them.
        start_failures: Ends before it was ever ready.
        restarts: Starts after the first, ever.
        present: Actors of the present process that have shown presence.
        last_exit: How the last process ended, for people; empty before the first end.
        by_operator: Whether a person has asked for its end.
        drained_ns: While it retires: when it must have handed back what it still holds.
    """

    spec: ChildSpec
    state: ChildState = ChildState.WAITING
    pid: int = 0
    started_ns: int = 0
    ready_ns: int = 0
    failures: int = 0
    start_failures: int = 0
    restarts: int = 0
    present: set[str] = field(default_factory=set)
    last_exit: str = ""
    drained_ns: int = 0
    by_operator: bool = False
