"""Roles of instances: asks a policy, and carries flips out one after the other, through BOTH.

Part of the coordinator's actor, which calls it. Owns, per model whose lease is held: the role of each instance, the
flip under way in each stage, when somebody was flipped or scaled last, and the policy's state.

| what happened | change |
|---|---|
| a tick | the policy is asked per stage; a flip begins, goes on, or is given up |
| SetRole | the role that an operator wants, as soon as fences let it |
| a stage has no prefill-capable or decode-capable instance | one does both, at once |
| the lease is taken | roles are those of the plan in force |

A flip: the instance does BOTH first, which every message under way allows: it takes new requests and keeps what it has.
The last hop waits until nothing moves from or to it, and until its decodes are few or ``drain_s`` is over; its broker,
or its migrator, hands the rest off after it. Where that does not come about within ``HOP_NS`` it stays with BOTH.

Invariants: at most one flip under way per stage; nobody is flipped twice within ``gap_s``; each stage with two
instances or more keeps a prefill-capable and a decode-capable one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

from millrace.actor.effects import Effect, Log
from millrace.contracts.coordinator import OrderRefusal
from millrace.contracts.plan import InstanceRole, Plan, Stage
from millrace.contracts.status import InstanceRecord
from millrace.policies.roles import ROLE_POLICIES, Flip, RoleDecision, RoleInstance, RolesView, may_take_role
from millrace.policies.stages.instance import InstanceModel

from services.coordinator.config import RolePolicyConfig, role_parameters
from services.coordinator.ladder import LadderView, Rung, acting, flips_held
from services.coordinator.role_windows import RoleWindows

NO_ROLES: Mapping[str, InstanceRole] = MappingProxyType({})

#: A last hop that its conditions do not allow within this time is given up.
HOP_NS = 30_000_000_000

#: Instances of a model whose roles are remembered; those that come back have the role that they had.
ROLES_MAX = 10_000


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
        roles: Of each instance that was ever planned here.
        homes: Roles that an operator set; they replace the configured ones.
        open: Flip under way, by stage.
        ordered: Flips that an operator asked for and that wait.
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

    roles: dict[str, InstanceRole] = field(default_factory=dict)
    homes: dict[str, InstanceRole] = field(default_factory=dict)
    open: dict[str, OpenFlip] = field(default_factory=dict)
    ordered: dict[str, InstanceRole] = field(default_factory=dict)
    states: dict[str, Any] = field(default_factory=dict)
    decisions: dict[str, RoleDecision] = field(default_factory=dict)
    flipped_ns: dict[str, int] = field(default_factory=dict)
    last_ns: int = 0
    scaled_ns: int = 0
    rung: Rung = Rung.DISPATCH
    counts: Counter[str] = field(default_factory=Counter)
    standing_in: set[str] = field(default_factory=set)
    last: str = ""


class Roles:
    """Sole owner of who does what.

    Attributes:
        windows: What was heard about loads.
    """

    def __init__(
        self,
        config: RolePolicyConfig,
        *,
        configured: Mapping[str, InstanceRole] = NO_ROLES,
        instance_model: Callable[[InstanceRecord], InstanceModel | None] = lambda record: None,
    ) -> None:
        """Raises ConfigError where the policy or its parameters are wrong.

        Args:
            config: Policy and fences.
            configured: Roles by instance or pattern.
            instance_model: Gives step costs; None where they are unknown.
        """
        self._config = config
        self._parameters = role_parameters(config)
        self._policy = ROLE_POLICIES[config.policy]
        self._configured = configured
        self._instance_model = instance_model
        self._models: dict[str, ModelRoles] = {}
        self.windows = RoleWindows(window_ns=_ns(config.window_s), demand_ns=_ns(config.demand_s))

    @property
    def policy(self) -> str:
        """Name of the policy."""
        return self._policy.name

    @property
    def observes(self) -> bool:
        """Whether loads and requests are needed."""
        return self._policy.observes

    def of_model(self, model: str) -> ModelRoles:
        """State of a model that is led here."""
        return self._models.setdefault(model, ModelRoles())

    def forget(self, model: str) -> None:
        """The lease is somebody else's."""
        if self._models.pop(model, None) is not None:
            self.windows.forget(model)

    # roles

    def of_stage(self, model: str, plan: Plan | None, names: Sequence[str]) -> dict[str, InstanceRole]:
        """Roles of a stage's instances, such that it can prefill and decode.

        Args:
            model: Its name.
            plan: In force: a new leader takes its roles over.
            names: Instances of the stage.
        """
        known = self.of_model(model)
        if plan is not None and not known.roles and self.observes:
            known.roles = {n: s.roles.get(n, InstanceRole.BOTH) for s in plan.stages for n in s.instances}
        for name in names:
            if name not in known.roles and len(known.roles) < ROLES_MAX:
                known.roles[name] = self._home(known, name)
        roles = {name: known.roles.get(name, InstanceRole.BOTH) for name in names}
        return self._repaired(known, roles) if self.observes or known.homes else roles

    def _home(self, known: ModelRoles, name: str) -> InstanceRole:
        return known.homes.get(name) or role_of(name, self._configured)

    def _repaired(self, known: ModelRoles, roles: dict[str, InstanceRole]) -> dict[str, InstanceRole]:
        """Somebody does both where a phase would have nobody, until others are back."""
        lacking = len(set(roles.values()) - {InstanceRole.BOTH}) == 1 and InstanceRole.BOTH not in roles.values()
        before = known.standing_in & set(roles)
        known.standing_in -= set(roles)
        if not lacking:
            return roles
        name = min(before or roles)
        known.standing_in.add(name)
        known.counts["repaired"] += name not in before
        return roles | {name: InstanceRole.BOTH}

    # decisions

    def tick(
        self, model: str, plan: Plan | None, records: Sequence[InstanceRecord], view: LadderView, now_ns: int
    ) -> list[Effect]:
        """Looks at one led model.

        Args:
            model: Its name.
            plan: In force.
            records: Of the instances that serve.
            view: Scaling, as provisioning tells it.
            now_ns: Unix ns.
        """
        known = self.of_model(model)
        if plan is None:
            return []
        known.scaled_ns = max(known.scaled_ns, view.scaled_ns)
        effects: list[Effect] = []
        serving = {record.instance: record for record in records}
        for stage in plan.stages:
            effects += self._tick_stage(model, stage, serving, view, now_ns)
        known.rung = acting(self.ladder(model, view))
        return effects

    def ladder(self, model: str, view: LadderView) -> LadderView:
        """The view with what is known of flips."""
        known = self.of_model(model)
        return LadderView(
            decisions=tuple(known.decisions.values()),
            flipping=bool(known.open),
            moving=view.moving,
            scaling=view.scaling,
            scales=view.scales,
            flipped_ns=known.last_ns,
            scaled_ns=max(view.scaled_ns, known.scaled_ns),
        )

    def _tick_stage(
        self, model: str, stage: Stage, serving: Mapping[str, InstanceRecord], scaling: LadderView, now_ns: int
    ) -> list[Effect]:
        known = self.of_model(model)
        names = [name for name in stage.instances if name in serving]
        effects = self._go_on(known, stage, names, now_ns)
        view = self._view(model, stage, [serving[name] for name in names], now_ns)
        state = known.states.get(stage.name, self._policy.initial_state)
        decision, known.states[stage.name] = self._policy.decide(view, self._parameters, state, now_ns)
        known.decisions[stage.name] = decision
        if stage.name in known.open or flips_held(self.ladder(model, scaling), now_ns):
            return effects
        wanted = self._ordered(known, view) or list(decision.flips)
        for flip in wanted:
            if not self._refusal(known, view, flip, now_ns):
                return effects + self._begin(known, stage.name, flip, decision.reason, now_ns)
        return effects

    def _view(self, model: str, stage: Stage, records: Sequence[InstanceRecord], now_ns: int) -> RolesView:
        known = self.of_model(model)
        instances = tuple(self._instance(known, record, now_ns) for record in records)
        demand = self.windows.demand(model, set(stage.instances), now_ns) if self.observes else None
        view = RolesView(model=model, stage=stage.name, instances=instances)
        return view if demand is None else RolesView(model=model, stage=stage.name, instances=instances, demand=demand)

    def _instance(self, known: ModelRoles, record: InstanceRecord, now_ns: int) -> RoleInstance:
        name = record.instance
        flip = next((flip for flip in known.open.values() if flip.instance == name), None)
        role = flip.target if flip is not None else known.roles.get(name, InstanceRole.BOTH)
        role = InstanceRole.BOTH if name in known.standing_in else role
        fixed = RoleInstance(name=name, role=role, home=self._home(known, name), movable=flip is None)
        if not self.observes:
            return fixed
        model = self._instance_model(record)
        return RoleInstance(
            name=name,
            role=role,
            home=fixed.home,
            movable=flip is None and self._rested(known, name, now_ns),
            heard=self.windows.heard(name, now_ns),
            indicators=self.windows.indicators(record, model, now_ns),
            model=model,
        )

    def _rested(self, known: ModelRoles, name: str, now_ns: int) -> bool:
        before_ns = known.flipped_ns.get(name)
        return before_ns is None or now_ns - before_ns >= _ns(self._config.gap_s)

    def _ordered(self, known: ModelRoles, view: RolesView) -> list[Flip]:
        wanted = []
        for each in view.instances:
            role = known.ordered.get(each.name)
            if role is not None and role is each.role:
                del known.ordered[each.name]
            elif role is not None:
                wanted.append(Flip(each.name, role))
        return wanted

    def _refusal(self, known: ModelRoles, view: RolesView, flip: Flip, now_ns: int) -> str:
        """Reason why a flip may not begin; empty where it may."""
        if not self._rested(known, flip.instance, now_ns):
            return "flipped lately"
        if not self._rested(known, f"/{view.stage}", now_ns):
            return "another one was flipped lately"
        if not may_take_role(view, flip.instance, flip.role):
            return "the stage could not prefill, or not decode"
        return ""

    # flips

    def _begin(self, known: ModelRoles, stage: str, flip: Flip, reason: str, now_ns: int) -> list[Effect]:
        before = known.roles.get(flip.instance, InstanceRole.BOTH)
        known.roles[flip.instance] = InstanceRole.BOTH
        known.flipped_ns[flip.instance] = known.flipped_ns[f"/{stage}"] = known.last_ns = now_ns
        known.counts["begun"] += 1
        known.last = f"{flip.instance} from {before} to {flip.role}: {reason}"
        if flip.role is InstanceRole.BOTH:
            known.counts["done"] += 1
        else:
            known.open[stage] = OpenFlip(instance=flip.instance, target=flip.role, since_ns=now_ns)
        fields = {"stage": stage, "instance": flip.instance, "before": str(before), "role": str(flip.role)}
        return [Log(level="info", event="flip_begun", fields=fields | {"reason": reason})]

    def _go_on(self, known: ModelRoles, stage: Stage, names: Sequence[str], now_ns: int) -> list[Effect]:
        """The last hop of the flip under way, where it may be done; its end where it cannot."""
        flip = known.open.get(stage.name)
        if flip is None:
            return []
        if not flip.shown_ns and flip.instance not in stage.roles:
            flip.shown_ns = now_ns
        late = now_ns - flip.since_ns >= HOP_NS
        if flip.instance not in names or late or not self._capable(known, names, flip):
            return self._end(known, stage.name, flip, "given_up", now_ns)
        if not flip.shown_ns or self._drains(flip, now_ns) or self.windows.open_moves(flip.instance, now_ns):
            return []
        known.roles[flip.instance] = flip.target
        return self._end(known, stage.name, flip, "done", now_ns)

    def _drains(self, flip: OpenFlip, now_ns: int) -> bool:
        """Whether it is too soon for the last hop; decodes of one that is to prefill may end there for a while."""
        done_both_ns = now_ns - flip.shown_ns
        settled = done_both_ns >= _ns(self._config.settle_s)
        if flip.target is not InstanceRole.PREFILL or done_both_ns >= _ns(self._config.drain_s):
            return not settled
        return not settled or self.windows.decoding(flip.instance) > 0

    def _capable(self, known: ModelRoles, names: Sequence[str], flip: OpenFlip) -> bool:
        roles = [flip.target if name == flip.instance else known.roles.get(name) for name in names]
        return any(r is not InstanceRole.DECODE for r in roles) and any(r is not InstanceRole.PREFILL for r in roles)

    def _end(self, known: ModelRoles, stage: str, flip: OpenFlip, outcome: str, now_ns: int) -> list[Effect]:
        del known.open[stage]
        known.counts[outcome] += 1
        known.flipped_ns[flip.instance] = known.flipped_ns[f"/{stage}"] = known.last_ns = now_ns
        fields = {"stage": stage, "instance": flip.instance, "role": str(flip.target), "outcome": outcome}
        fields["took_s"] = f"{(now_ns - flip.since_ns) / 1e9:.1f}"
        return [Log(level="info", event="flip_ended", fields=fields)]

    # orders

    def order(self, model: str, plan: Plan | None, instance: str, role: InstanceRole) -> OrderRefusal | None:
        """Takes an operator's order, or says why not. It is carried out as soon as fences let it."""
        stage = next((s for s in plan.stages if instance in s.instances), None) if plan is not None else None
        if stage is None:
            return OrderRefusal.UNKNOWN_INSTANCE
        known = self.of_model(model)
        roles = {name: known.ordered.get(name, known.roles.get(name, InstanceRole.BOTH)) for name in stage.instances}
        roles[instance] = role
        view = RolesView(
            model=model, stage=stage.name, instances=tuple(RoleInstance(name=n, role=r) for n, r in roles.items())
        )
        if not may_take_role(view, instance, role):
            return OrderRefusal.NOT_CAPABLE
        known.ordered[instance] = known.homes[instance] = role
        return None

    # for people and checkers

    def snapshot(self) -> dict[str, Any]:
        """Flips and the rung that acts, by model."""
        return {
            model: {
                "rung": str(known.rung),
                "flipping": {stage: f"{flip.instance} to {flip.target}" for stage, flip in known.open.items()},
                "counts": dict(sorted(known.counts.items())),
                "last": known.last,
            }
            for model, known in sorted(self._models.items())
        }

    def check(self) -> None:
        """Raises AssertionError where an invariant does not hold."""
        self.windows.check()
        for known in self._models.values():
            assert len(known.roles) <= ROLES_MAX
            for flip in known.open.values():
                assert known.roles.get(flip.instance) is InstanceRole.BOTH, f"{flip.instance} is flipped past BOTH"


def role_of(name: str, roles: Mapping[str, InstanceRole]) -> InstanceRole:
    """The role that stands under the instance's name; else under the first pattern that fits; else BOTH."""
    if name in roles:
        return roles[name]
    return next((role for pattern, role in roles.items() if fnmatchcase(name, pattern)), InstanceRole.BOTH)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
