"""Effects and events between the supervisor's actor and its shell: processes to start and to signal, and what became
of them.
"""

from __future__ import annotations

from millrace.actor.effects import Effect
from millrace.contracts.message import Body

from services.supervisor.config import ChildSpec, SupervisorConfig


class StartChild(Effect, frozen=True, kw_only=True):
    """Starts a process: ChildStarted, or ChildExited where it could not be started."""

    spec: ChildSpec


class SignalChild(Effect, frozen=True, kw_only=True):
    """Sends a signal to a child's process. A process that has already ended is no error."""

    name: str
    pid: int
    signal: int


class ReadSpecification(Effect, frozen=True, kw_only=True):
    """Reads the wanted specification: SpecificationRead.

    Attributes:
        take: Whether it is in force from then on.
    """

    take: bool
    reply_to: str


class SpecificationRead(Body, frozen=True, kw_only=True, tag="local.SpecificationRead/1"):
    """The wanted specification, as it is here.

    Attributes:
        take: Whether it is in force from now on.
        machine: None where it is refused.
        refused: Reason why it cannot be had.
    """

    take: bool
    reply_to: str
    machine: SupervisorConfig | None = None
    refused: str = ""


class ChildStarted(Body, frozen=True, kw_only=True, tag="local.ChildStarted/1"):
    """The process runs."""

    name: str
    pid: int


class ChildExited(Body, frozen=True, kw_only=True, tag="local.ChildExited/1"):
    """The process ended, or could not be started (pid 0).

    Attributes:
        status: Exit status; the negative signal number where a signal ended it.
        detail: A sentence where it could not be started.
        oom_kills: Processes that the kernel has killed for the memory limit of the control group since the last one.
    """

    name: str
    pid: int
    status: int
    detail: str = ""
    oom_kills: int = 0


class MachineChecked(Body, frozen=True, kw_only=True, tag="local.MachineChecked/1"):
    """The shell has looked at a server's store and at the disk.

    Attributes:
        server: Process of the NATS server.
        store: Reason why JetStream takes no writes; empty where it does.
        room: Whether there is room where JetStream's files are.
        disk: Sentence where the disk of the cluster's folder is full; else empty.
        renewed: Whether the server's certificate is another one than before.
    """

    server: str = "nats"
    store: str
    room: bool
    disk: str
    renewed: bool = False
