"""Input and output of a provisioning policy."""

from __future__ import annotations

import msgspec


class InstanceLoad(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One instance that serves.

    Attributes:
        since_ns: When its process started, unix ns.
        requests: Sequences that run or wait there.
        utilisation: The larger of requests per place in the running batch (over 1 where a queue stands) and the share
            of KV blocks in use.
        stoppable: False where no provisioner can stop it.
    """

    name: str
    since_ns: int
    requests: int = 0
    utilisation: float = 0.0
    stoppable: bool = True


class LatencySample(msgspec.Struct, frozen=True, gc=False):
    """One latency: when it became known (unix ns), and how long (ns)."""

    at_ns: int
    latency_ns: int


class ProvisioningView(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One question: more instances of this model, or fewer?

    Attributes:
        serving: Those that take requests, in order of name.
        absent: Registered, yet silent or dead just now: a supervisor is probably starting them again.
        starting: Asked for and not there yet.
        stopping: Draining, by whatever cause.
        failures: Starts in a row that failed.
        predicted: End-to-end latencies that were forecast for placements, oldest first, the latest few thousand.
        measured: End-to-end latencies of requests that completed, likewise.
    """

    model: str
    serving: tuple[InstanceLoad, ...] = ()
    absent: int = 0
    starting: int = 0
    stopping: int = 0
    failures: int = 0
    predicted: tuple[LatencySample, ...] = ()
    measured: tuple[LatencySample, ...] = ()


class ProvisioningDecision(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An answer.

    Attributes:
        start: Instances to be started.
        stop: Instances to be drained and stopped.
        reason: One sentence with units; why nothing is done, where nothing is.
        signal_ns: The latency that was compared with the threshold; None where there is none.
        utilisation: Mean over the serving instances.
    """

    start: int = 0
    stop: tuple[str, ...] = ()
    reason: str = ""
    signal_ns: int | None = None
    utilisation: float = 0.0
