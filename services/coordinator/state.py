"""State of the coordinator: instances, and per model the lease and the plan."""

from __future__ import annotations

from dataclasses import dataclass, field

from millrace.contracts.local import KeyChanged
from millrace.contracts.plan import Lease, Plan
from millrace.contracts.status import InstanceRecord, InstanceSummary


@dataclass
class RegisteredInstance:
    """One registered instance.

    Attributes:
        seen_ns: When its last sign of life came.
        dead_before_ns: Incarnations up to this time are known to be dead.
        summary: The last one of this incarnation or an earlier one; None before the first.
    """

    record: InstanceRecord
    seen_ns: int
    draining: bool = False
    dead_before_ns: int = 0
    summary: InstanceSummary | None = None

    def serves(self, now_ns: int, silence_ns_max: int) -> bool:
        """Whether the plan should name it."""
        alive = now_ns - self.seen_ns <= silence_ns_max and self.record.incarnation > self.dead_before_ns
        return alive and not self.draining


@dataclass
class KeyState:
    """A key in a bucket as this coordinator last saw it.

    Attributes:
        revision: 0 where it does not exist.
        stale: Not confirmed since the bus came back.
        writing: A write is under way; no second one is begun.
    """

    revision: int = 0
    stale: bool = False
    writing: bool = False

    def confirm(self, body: KeyChanged) -> None:
        """Takes what the watch says of the key."""
        self.stale, self.writing = False, False
        self.revision = body.revision if body.value is not None else 0


@dataclass
class ModelState:
    """Lease and plan of one model.

    Attributes:
        only_decode: Stages of the last plan written here that have no instance for prefills.
    """

    lease: Lease | None = None
    lease_key: KeyState = field(default_factory=KeyState)
    plan: Plan | None = None
    plan_key: KeyState = field(default_factory=KeyState)
    only_decode: list[str] = field(default_factory=list)
