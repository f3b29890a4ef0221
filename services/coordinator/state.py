"""State of the coordinator: registered instances, and per model the lease and the plan."""

from __future__ import annotations

from dataclasses import dataclass, field

from millrace.contracts.local import KeyChanged
from millrace.contracts.plan import Lease, Plan
from millrace.contracts.status import InstanceRecord, InstanceSummary
from millrace.membership import Member, MemberState


@dataclass(frozen=True, slots=True)
class RegisteredInstance:
    """One registered instance as it is now.

    Attributes:
        serving: Whether the plan should name it.
        draining: Whether it says that it leaves.
        summary: The last one of this incarnation; None before the first.
    """

    record: InstanceRecord
    serving: bool
    draining: bool = False
    summary: InstanceSummary | None = None

    @classmethod
    def of(cls, member: Member, record: InstanceRecord) -> RegisteredInstance:
        """A member that has a record."""
        return cls(record, member.serving, member.state is MemberState.DRAINING, member.summary)


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
