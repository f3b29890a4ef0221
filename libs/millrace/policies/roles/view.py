"""Input and output of a role policy, for one stage."""

from __future__ import annotations

import msgspec

from millrace.contracts.plan import InstanceRole
from millrace.contracts.status import InstanceRecord, InstanceSummary


class RoleInstance(msgspec.Struct, frozen=True, kw_only=True):
    """One instance of a stage.

    Attributes:
        role: The one that it is on its way to, where a flip is under way.
        home: Role that an operator or the configuration gives it.
        movable: Whether it may be flipped now: no flip under way or just done.
        record: Its limits; None where a policy does not observe.
        summaries: Of the last seconds, oldest first, where a policy observes; empty where none was heard.
    """

    name: str
    role: InstanceRole = InstanceRole.BOTH
    home: InstanceRole = InstanceRole.BOTH
    movable: bool = True
    record: InstanceRecord | None = None
    summaries: tuple[InstanceSummary, ...] = ()

    @property
    def prefills(self) -> bool:
        """Whether it takes new requests."""
        return self.role is not InstanceRole.DECODE

    @property
    def decodes(self) -> bool:
        """Whether it keeps sequences after their first token."""
        return self.role is not InstanceRole.PREFILL


class RolesView(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of a model: who does what.

    Attributes:
        instances: In order of name.
    """

    model: str
    stage: str
    instances: tuple[RoleInstance, ...] = ()


class Flip(msgspec.Struct, frozen=True):
    """One instance shall have another role."""

    instance: str
    role: InstanceRole


class RoleDecision(msgspec.Struct, frozen=True, kw_only=True):
    """Decision of a role policy for a stage.

    Attributes:
        flips: The coordinator carries them out one after the other.
    """

    flips: tuple[Flip, ...] = ()
    reason: str = ""


def may_take_role(view: RolesView, instance: str, role: InstanceRole) -> bool:
    """Whether a stage keeps a prefill-capable and a decode-capable instance if one takes a role."""
    roles = [role if each.name == instance else each.role for each in view.instances]
    prefills = any(each is not InstanceRole.DECODE for each in roles)
    decodes = any(each is not InstanceRole.PREFILL for each in roles)
    return prefills and decodes
