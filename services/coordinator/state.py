"""Registered instances, as the coordinator's controls see them."""

from __future__ import annotations

from dataclasses import dataclass

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
