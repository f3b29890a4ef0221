"""A role policy that never lets roles be: about every second it wants another role for some instance of a stage."""

from __future__ import annotations

from random import Random

from millrace.contracts.plan import InstanceRole
from millrace.policies.roles import Flip, RoleDecision, RolesView, may_take_role

#: It looks at no load.
observes = False


def decide(view: RolesView, parameters: object, state: object, now_ns: int) -> tuple[RoleDecision, object]:
    """Draws by time and stage, so that two coordinators want the same."""
    rng = Random(f"{view.model}/{view.stage}/{now_ns // 1_000_000_000}")
    able = [each for each in view.instances if each.movable]
    if not able or rng.random() < 0.3:
        return RoleDecision(reason="at rest"), state
    chosen, role = rng.choice(able), rng.choice(tuple(InstanceRole))
    if role is chosen.role or not may_take_role(view, chosen.name, role):
        return RoleDecision(reason="nothing drawn"), state
    return RoleDecision(flips=(Flip(chosen.name, role),), reason="drawn"), state
