"""State of the roles of one model: who does what, the flip under way in each stage, and orders that wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from millrace.contracts.plan import InstanceRole, Plan
from millrace.policies.roles import RoleDecision

from services.coordinator.ladder import Rung


@dataclass(kw_only=True)
class OpenFlip:
    """A flip under way: the instance does BOTH.

    Attributes:
        since_ns: When it began.
        shown_ns: When the plan in force first said that it does both; 0 before.
    """

    instance: str
    target: InstanceRole
    since_ns: int
    shown_ns: int = 0


@dataclass(kw_only=True)
class ModelRoles:
    """One model.

    Attributes:
        leads: Whether a plan was made here; before, the plan in force is a predecessor's.
        roles: Of each instance that was ever planned here.
        homes: Roles that an operator ordered; they replace the configured ones.
        open: Flip under way, by stage.
        ordered: Those of them that instances do not have yet.
        held: Why the first of those has not begun; empty where nothing holds it.
        states: The policy's, by stage.
        decisions: The last ones, by stage.
        flipped_ns: Last change, by instance; by stage under the stage's name with a slash before it.
        last_ns: Last change of any.
        scaled_ns: When the number of instances changed last.
        rung: Acts now.
        counts: Flips begun, done, given up; repairs.
        standing_in: Instances that do both because a phase would have nobody.
        last: The last flip and its reason.
    """

    leads: bool = False
    roles: dict[str, InstanceRole] = field(default_factory=dict)
    homes: dict[str, InstanceRole] = field(default_factory=dict)
    open: dict[str, OpenFlip] = field(default_factory=dict)
    ordered: dict[str, InstanceRole] = field(default_factory=dict)
    held: str = ""
    states: dict[str, Any] = field(default_factory=dict)
    decisions: dict[str, RoleDecision] = field(default_factory=dict)
    flipped_ns: dict[str, int] = field(default_factory=dict)
    last_ns: int = 0
    scaled_ns: int = 0
    rung: Rung = Rung.DISPATCH
    counts: Counter[str] = field(default_factory=Counter)
    standing_in: set[str] = field(default_factory=set)
    last: str = ""

    def take_over(self, plan: Plan, *, every: bool, now_ns: int) -> None:
        """Goes on where the coordinator that wrote the plan ended: with its orders, and the flips under way for them.

        Args:
            plan: In force.
            every: Whether all roles of the plan are taken over, also those that nobody ordered.
            now_ns: Unix ns. No other flip begins for a while: the last one of the predecessor is not known.
        """
        planned = {n: s.roles.get(n, InstanceRole.BOTH) for s in plan.stages for n in s.instances}
        self.homes |= plan.role_orders
        self.roles = {n: role for n, role in planned.items() if every or n in self.homes}
        self.ordered |= {n: role for n, role in self.homes.items() if planned.get(n) is not role}
        for stage in plan.stages:
            self.flipped_ns[f"/{stage.name}"] = now_ns
            for name in stage.instances:
                if name in self.ordered and planned[name] is InstanceRole.BOTH and stage.name not in self.open:
                    self.open[stage.name] = OpenFlip(instance=name, target=self.ordered[name], since_ns=now_ns)


def role_of(name: str, roles: Mapping[str, InstanceRole]) -> InstanceRole:
    """The role that stands under the instance's name; else under the first pattern that fits; else BOTH."""
    if name in roles:
        return roles[name]
    return next((role for pattern, role in roles.items() if fnmatchcase(name, pattern)), InstanceRole.BOTH)
