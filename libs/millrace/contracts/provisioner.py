"""Messages a provisioner receives, and its answers. A provisioner starts and stops instances on one host: the local
supervisor, the one beside docker compose, or a simulated one.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from millrace.contracts.message import Body


class StartInstance(Body, frozen=True, kw_only=True, tag="StartInstance/1"):
    """Asks for one more instance. Idempotent per ``order``. Answered by InstanceOrdered or OrderRefused.

    Attributes:
        order: Chosen by the asker, unique for ever; the same order is the same instance.
        model: Served model name; may be empty where ``instance`` is not.
        shape: What it runs on, such as ``cpu`` or ``h100x2``; empty for any.
        instance: This one and no other, also where an operator has drained it; empty for the first that is free.
    """

    order: str
    model: str
    shape: str = ""
    instance: str = ""


class StopInstance(Body, frozen=True, kw_only=True, tag="StopInstance/1"):
    """Asks that an instance be drained, ended and not started again. Idempotent. Answered by InstanceOrdered or
    OrderRefused.

    Attributes:
        drain_limit_ms: How long its sequences may go on before they are handed back.
        operator: Whether a person asks. The instance is then started again by name only, and is listed as drained until
            then.
    """

    instance: str
    drain_limit_ms: int = 10_000
    operator: bool = False


class InstanceOrdered(Body, frozen=True, kw_only=True, tag="InstanceOrdered/1"):
    """The order is taken. The instance is kept running from now on, and registers once its engine is ready; or it
    drains and will be gone within the limit and a little more, whatever becomes of it.
    """

    instance: str


class UpdateCluster(Body, frozen=True, kw_only=True, tag="UpdateCluster/1"):
    """Asks a supervisor to compare its processes with the cluster's specification, and to bring some of them in line.
    Answered by ClusterCompared. Instances are not touched: StartInstance and StopInstance replace them, with a drain.

    Attributes:
        wanted: Compare with the specification that lies in the cluster's folder as ``run/wanted.toml``, not with the
            one in force. It is a file, not part of the message: who may write there may start programs in any case.
        take: That one is in force from now on: what starts, starts by it.
        processes: Of the specification in force: those to start where they are added, to end where they are removed,
            and to start anew where they have changed.
        reason: For the log of orders.
    """

    wanted: bool = False
    take: bool = False
    processes: list[str] = []
    reason: str = ""


class ProcessChange(StrEnum):
    """Difference between a process and its specification. Closed set."""

    SAME = "same"
    CHANGED = "changed"
    ADDED = "added"
    REMOVED = "removed"


class ComparedProcess(msgspec.Struct, frozen=True):
    """One process, of those that run and those that should.

    Attributes:
        state: The supervisor's; empty where it does not run.
        model: Of a worker that is wanted.
        serves: Of a worker that runs: its model now.
        instances: Of a worker.
        failures: Ends in a row before it was ready.
        restarts: Starts after the first.
        detail: How it last ended.
    """

    name: str
    role: str
    change: ProcessChange
    state: str = ""
    model: str = ""
    serves: str = ""
    instances: list[str] = []
    failures: int = 0
    detail: str = ""
    restarts: int = 0


class ClusterCompared(Body, frozen=True, kw_only=True, tag="ClusterCompared/1"):
    """Every process of this host.

    Attributes:
        refused: Reason why the wanted specification cannot be had without a restart; nothing was done then.
    """

    processes: list[ComparedProcess] = []
    refused: str = ""
