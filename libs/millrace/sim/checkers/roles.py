"""Roles in plans: every stage can prefill and decode and no instance flips back and forth."""

from __future__ import annotations

from millrace.actor.effects import Effect, PutKey
from millrace.contracts.message import Message
from millrace.contracts.plan import InstanceRole, Plan
from millrace.sim.checkers import Checker
from millrace.sim.process import SimProcess
from millrace.sim.runtime_sim import SECOND


class CapableRoles(Checker):
    """Looks at every plan that a coordinator writes.

    Attributes:
        flips: (unix ns, instance, role before, role now) of each change of a role, oldest first.
    """

    def __init__(self, *, gap_ns: int) -> None:
        """Args: gap_ns: An instance that has left a role for BOTH and come to another one does not leave it sooner."""
        self.flips: list[tuple[int, str, InstanceRole, InstanceRole]] = []
        self._gap_ns = gap_ns
        self._roles: dict[str, InstanceRole] = {}
        self._settled_ns: dict[str, int] = {}

    def on_handled(self, process: SimProcess, message: Message, effects: list[Effect]) -> None:
        """Compare each plan with the one before."""
        for effect in effects:
            if isinstance(effect, PutKey) and isinstance(effect.value, Plan):
                self._on_plan(effect.value, process.now_ns)

    def _on_plan(self, plan: Plan, now_ns: int) -> None:
        for stage in plan.stages:
            roles = {name: stage.roles.get(name, InstanceRole.BOTH) for name in stage.instances}
            self._check_capable(stage.name, roles)
            for name, role in roles.items():
                before = self._roles.get(name, role)
                if role is not before:
                    self._on_flip(name, before, role, now_ns)
                self._roles[name] = role

    def _check_capable(self, stage: str, roles: dict[str, InstanceRole]) -> None:
        if not roles:
            return
        assert any(r is not InstanceRole.DECODE for r in roles.values()), f"{stage}: no instance prefills: {roles}"
        assert any(r is not InstanceRole.PREFILL for r in roles.values()), f"{stage}: no instance decodes: {roles}"

    def _on_flip(self, name: str, before: InstanceRole, role: InstanceRole, now_ns: int) -> None:
        both = InstanceRole.BOTH
        assert both in (before, role), f"{name} is flipped from {before} to {role} without doing both"
        if before is both:
            self._settled_ns[name] = now_ns
        elif (settled_ns := self._settled_ns.get(name)) is not None:
            apart_s = (now_ns - settled_ns) / SECOND
            assert now_ns - settled_ns >= self._gap_ns, f"{name} leaves {before} {apart_s:.1f} s after it came to it"
        self.flips.append((now_ns, name, before, role))
