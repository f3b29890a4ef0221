"""The next plan of a model: what its controllers proposed, with the instances that serve now. Pure but for its memory.

Owns, per model that is led, the proposals in force and the stage in which each instance served. Changes of membership
apply at once and move no other instance.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import msgspec
from millrace.contracts.coordinator import PlanProposed
from millrace.contracts.plan import Advice, InstanceRole, Plan, PlanExpectation, Stage
from millrace.contracts.status import InstanceRecord
from millrace.policies.stages import StageShape, assign, stages_of

from services.coordinator.config import CoordinatorConfig
from services.coordinator.stages import layout_of

#: Stages in which instances served are remembered for so many instances of a model; beyond, returning ones go where
#: most are missing.
HOMES_MAX = 10_000


@dataclass
class Wanted:
    """Proposals about one model.

    Attributes:
        numbers: Of the last one, by controller.
        stages: The last ranges; None before.
        policy, reason, expects: Of those ranges.
        roles: Other roles than ordered or configured ones; None before it is known which there are.
        role_orders: Roles that an operator ordered here, beside those of the plan in force; None withdraws one.
        homes: Instance -> index of its stage in the present layout.
        advice: None to leave that of the plan in force.
    """

    numbers: dict[str, int] = field(default_factory=dict)
    stages: list[Stage] | None = None
    policy: str = "one_stage"
    reason: str = ""
    expects: PlanExpectation | None = None
    roles: dict[str, InstanceRole] | None = None
    role_orders: dict[str, InstanceRole | None] = field(default_factory=dict)
    homes: dict[str, int] = field(default_factory=dict)
    advice: Advice | None = None


class PlanWriting:
    """Sole owner of what the next plan of each model shall be."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self._name = config.name
        self._ranges = config.stages.ranges
        self._configured = config.roles
        self._models: dict[str, Wanted] = {}

    def take(self, body: PlanProposed) -> bool:
        """Takes a proposal; returns whether it is new."""
        wanted = self._models.setdefault(body.model, Wanted())
        if body.number <= wanted.numbers.get(body.by, -1):
            return False
        wanted.numbers[body.by] = body.number
        if body.stages is not None:
            wanted.stages, wanted.policy = body.stages, body.policy
            wanted.reason, wanted.expects = body.reason, body.expects
        if body.roles is not None:
            wanted.roles = dict(body.roles)
        wanted.role_orders |= body.role_orders
        wanted.advice = body.advice or wanted.advice
        return True

    def forget(self, model: str) -> None:
        """The model's lease is held by another coordinator."""
        self._models.pop(model, None)

    def next_plan(self, model: str, plan: Plan | None, records: Sequence[InstanceRecord]) -> Plan | None:
        """The wishes of controllers, with the instances that serve now; None where the plan in force says the same."""
        wanted = self._models.setdefault(model, Wanted())
        names = [record.instance for record in records]
        shapes = self._shapes(wanted, plan, len(records))
        before = plan.stages if plan is not None else []
        same_cuts = plan is not None and plan.cuts == [shape.length_min for shape in shapes[1:]]
        if not same_cuts:
            wanted.homes.clear()
        members = assign(
            shapes,
            names,
            previous=before,
            homes=wanted.homes,
            hosts={record.instance: record.host for record in records},
            pins=self._pins(model, names),
        )
        self._remember(wanted, members)
        orders = _orders(wanted, plan)
        stages = stages_of(shapes, members, self._roles(wanted, plan, members))
        advice = wanted.advice or (plan.advice if plan is not None else None)
        if plan is not None and (stages, orders, advice) == (before, plan.role_orders, plan.advice):
            return None
        epoch = plan.epoch + 1 if plan is not None else 1
        return Plan(
            model=model,
            epoch=epoch,
            stages=stages,
            coordinator=self._name,
            boundary_epoch=plan.boundary_epoch if plan is not None and same_cuts else epoch,
            policy=wanted.policy if wanted.stages is not None or plan is None else plan.policy,
            reason=_change(plan, stages) if plan is not None and same_cuts else wanted.reason or "one stage",
            expects=wanted.expects,
            role_orders=orders,
            advice=advice,
        )

    def _shapes(self, wanted: Wanted, plan: Plan | None, count: int) -> tuple[StageShape, ...]:
        """The proposed ranges; without a proposal those in force, else one stage."""
        if wanted.stages is not None:
            return tuple(
                StageShape(length_min=s.length_min, length_max=s.length_max, instances=s.instances_wanted)
                for s in wanted.stages
            )
        layout = layout_of(plan)
        one = StageShape(length_min=0, length_max=None, instances=max(1, count))
        return layout if len(layout) > 1 else (one,)

    def _roles(self, wanted: Wanted, plan: Plan | None, members: Sequence[Sequence[str]]) -> dict[str, InstanceRole]:
        """Role of each instance, such that every stage can prefill and decode."""
        orders, before = _orders(wanted, plan), roles_of(plan)
        other: Mapping[str, InstanceRole] = before if wanted.roles is None else wanted.roles
        roles: dict[str, InstanceRole] = {}
        for names in members:
            stage = {n: other.get(n) or orders.get(n) or role_of(n, self._configured) for n in names}
            roles |= capable(stage, before)
        return roles

    def _remember(self, wanted: Wanted, members: Sequence[Sequence[str]]) -> None:
        for index, names in enumerate(members):
            for name in names:
                if name in wanted.homes or len(wanted.homes) < HOMES_MAX:
                    wanted.homes[name] = index

    def _pins(self, model: str, names: Iterable[str]) -> dict[str, int]:
        """Instances that the configuration gives to a stage: the first one that names them."""
        pins: dict[str, int] = {}
        for index, each in enumerate(self._ranges.get(model, ())):
            for name in names:
                if name not in pins and any(fnmatchcase(name, pattern) for pattern in each.members):
                    pins[name] = index
        return pins

    def check(self) -> None:
        assert all(len(wanted.homes) <= HOMES_MAX for wanted in self._models.values())


def _orders(wanted: Wanted, plan: Plan | None) -> dict[str, InstanceRole]:
    orders = (plan.role_orders if plan is not None else {}) | wanted.role_orders
    return {name: role for name, role in sorted(orders.items()) if role is not None}


def capable(stage: Mapping[str, InstanceRole], before: Mapping[str, InstanceRole]) -> dict[str, InstanceRole]:
    """Roles of a stage's instances: where a phase would have none, one does both until others are back.

    Args:
        before: Roles of the plan in force; the one that stands in already goes on.
    """
    lacking = len(set(stage.values())) == 1 and InstanceRole.BOTH not in stage.values()
    if not lacking:
        return dict(stage)
    standing_in = [name for name in stage if before.get(name) is InstanceRole.BOTH]
    return dict(stage) | {min(standing_in or stage): InstanceRole.BOTH}


def roles_of(plan: Plan | None) -> dict[str, InstanceRole]:
    """Role of each instance of a plan."""
    stages = plan.stages if plan is not None else []
    return {name: stage.roles.get(name, InstanceRole.BOTH) for stage in stages for name in stage.instances}


def role_of(name: str, roles: Mapping[str, InstanceRole]) -> InstanceRole:
    """The role that stands under the instance's name; else under the first pattern that fits; else BOTH."""
    if name in roles:
        return roles[name]
    return next((role for pattern, role in roles.items() if fnmatchcase(name, pattern)), InstanceRole.BOTH)


def _change(plan: Plan, stages: Sequence[Stage]) -> str:
    """Human-readable list of the instances that joined and left."""
    before = {name for stage in plan.stages for name in stage.instances}
    now = {name for stage in stages for name in stage.instances}
    joined, left = sorted(now - before), sorted(before - now)
    told = [
        f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''} {verb}"
        for names, verb in ((joined, "joined"), (left, "left"))
        if names
    ]
    return ", ".join(told) or (plan.reason if stages == plan.stages else "instances or roles changed")


def rewritten(plan: Plan, coordinator: str) -> Plan:
    """The plan in force under a new epoch, for a store that lost it."""
    told = {"epoch": plan.epoch + 1, "coordinator": coordinator, "reason": "the store lost the plan"}
    return msgspec.structs.replace(plan, **told)
