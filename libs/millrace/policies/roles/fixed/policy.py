"""Fixed: every instance has the role that the configuration gives it."""

from __future__ import annotations

from millrace.policies.registry import Nothing
from millrace.policies.roles.view import Flip, RoleDecision, RolesView, may_take_role

observes = False


def decide(view: RolesView, parameters: Nothing, state: Nothing, now_ns: int) -> tuple[RoleDecision, Nothing]:
    """Bring an instance back to its configured role, as after an order of an operator that was withdrawn."""
    for each in view.instances:
        if each.role is not each.home and each.movable and may_take_role(view, each.name, each.home):
            reason = f"{each.name} back to {each.home}, as configured"
            return RoleDecision(flips=(Flip(each.name, each.home),), reason=reason), state
    return RoleDecision(reason="roles are fixed"), state
