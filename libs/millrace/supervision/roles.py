"""Roles of instances as a command line names them, for whoever writes a coordinator's configuration."""

from __future__ import annotations

from millrace.contracts.plan import InstanceRole


def roles_of(text: str) -> dict[str, str]:
    """The roles in ``worker-0=prefill,worker-1=decode``; names may be patterns. None are no roles: all do both.

    Raises:
        ValueError: not a list of INSTANCE=ROLE, or no such role.
    """
    roles: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        instance, equals, role = part.strip().partition("=")
        if not instance or not equals or role not in list(InstanceRole):
            raise ValueError(f"{part.strip()!r} is not INSTANCE=ROLE with a role of {', '.join(InstanceRole)}")
        roles[instance] = role
    return roles
