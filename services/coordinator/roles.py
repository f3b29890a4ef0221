"""Roles of instances: asks a policy, and carries flips out one after the other, through BOTH.

Part of the coordinator's actor, which calls it. Owns, per model whose lease is held: the role of each instance, the
flip under way in each stage, when somebody was flipped or scaled last, and the policy's state.

| what happened | change |
|---|---|
| a tick | the policy is asked per stage; a flip begins, goes on, or is given up |
| SetRole | the role that an operator wants, as soon as fences let it |
| a stage has no prefill-capable or decode-capable instance | one does both, at once |
| the lease is taken | roles and orders are those of the plan in force; the flip under way for an order goes on |

A flip: the instance does BOTH first, which every message under way allows: it takes new requests and keeps what it has.
The last hop waits until nothing moves from or to it, and until its decodes are few or ``drain_s`` is over; its broker,
or its migrator, hands the rest off after it. Where that does not come about within ``HOP_NS`` it stays with BOTH.

Invariants: at most one flip under way per stage; nobody is flipped twice within ``gap_s``; each stage with two
instances or more keeps a prefill-capable and a decode-capable one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from millrace.actor.effects import Effect, Log
from millrace.contracts.coordinator import OrderAccepted, OrderRefusal, OrderRefused, SetRole
from millrace.contracts.plan import InstanceRole, Plan, Stage
from millrace.contracts.status import InstanceRecord
from millrace.policies.roles import Flip, RoleInstance, RolesView, may_take_role
from millrace.policies.stages.instance import InstanceModel

from services.coordinator.config import RolePolicyConfig, role_policy
from services.coordinator.ladder import LadderView, acting, flips_held
from services.coordinator.role_state import ModelRoles, OpenFlip, role_of
from services.coordinator.role_windows import RoleWindows

NO_ROLES: Mapping[str, InstanceRole] = MappingProxyType({})

#: A last hop that its conditions do not allow within this time is given up.
HOP_NS = 30_000_000_000

#: Instances of a model whose roles are remembered; those that come back have the role that they had.
ROLES_MAX = 10_000


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
        self._policy, self._parameters = role_policy(config)
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

    def of_stage(self, model: str, plan: Plan | None, names: Sequence[str], now_ns: int) -> dict[str, InstanceRole]:
        """Roles of a stage's instances, such that it can prefill and decode.

        Args:
            model: Its name.
            plan: In force: a new leader takes its roles over.
            names: Instances of the stage.
            now_ns: Unix ns.
        """
        known = self.of_model(model)
        if plan is not None and not known.roles and not known.leads:
            known.take_over(plan, every=self.observes, now_ns=now_ns)
        known.leads = known.leads or bool(names)
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
        ordered = self._ordered(known, view)
        ladder = self.ladder(model, scaling)
        if ordered:
            known.held = self._fence(known, stage.name, ordered[0].instance, ladder, now_ns)[1]
        if stage.name in known.open or flips_held(ladder, now_ns):
            return effects
        for flip in ordered or decision.flips:
            if not self._refusal(known, view, flip, now_ns):
                reason = "ordered by an operator" if ordered else decision.reason
                return effects + self._begin(known, stage.name, flip, reason, now_ns)
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
            token_budget=record.token_budget,
        )

    def _rested(self, known: ModelRoles, name: str, now_ns: int) -> bool:
        before_ns = known.flipped_ns.get(name)
        return before_ns is None or now_ns - before_ns >= _ns(self._config.gap_s)

    def _ordered(self, known: ModelRoles, view: RolesView) -> list[Flip]:
        """Orders that wait. One whose flip was given up is among them again."""
        under_way = {flip.instance for flip in known.open.values()}
        wanted = []
        for each in view.instances:
            role = known.ordered.get(each.name)
            if role is None or each.name in under_way:
                continue
            if role is each.role:
                del known.ordered[each.name]
            else:
                wanted.append(Flip(each.name, role))
        return wanted

    def _fence(
        self, known: ModelRoles, stage: str, instance: str, ladder: LadderView, now_ns: int
    ) -> tuple[OrderRefusal | None, str]:
        """Reason that holds a flip of an instance back now, and its words; None and empty where nothing does."""
        if (flip := known.open.get(stage)) is not None:
            return OrderRefusal.FLIP_OPEN, f"{flip.instance} is on its way to {flip.target}"
        if held := flips_held(ladder, now_ns):
            return OrderRefusal.SCALED_LATELY, held
        for key, who in ((instance, instance), (f"/{stage}", "another one of its stage")):
            if not self._rested(known, key, now_ns):
                ago_s = (now_ns - known.flipped_ns[key]) / 1e9
                left_s = self._config.gap_s - ago_s
                return OrderRefusal.FLIPPED_LATELY, f"{who} was flipped {ago_s:.0f} s ago; {left_s:.0f} s to wait"
        return None, ""

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

    def order(self, body: SetRole, plan: Plan | None, ladder: LadderView, now_ns: int) -> OrderAccepted | OrderRefused:
        """Takes an operator's order, or says why not. It is carried out as soon as fences let it.

        Args:
            body: The order.
            plan: In force.
            ladder: With flips, as `ladder` gives it.
            now_ns: Unix ns.
        """
        stage = next((s for s in plan.stages if body.instance in s.instances), None) if plan is not None else None
        if stage is None:
            detail = f"no {body.instance} in the plan of {body.model}"
            return OrderRefused(reason=OrderRefusal.UNKNOWN_INSTANCE, detail=detail)
        known = self.of_model(body.model)
        if not self._keeps_capable(known, stage, body):
            detail = f"with {body.instance} as {body.role} its stage could not prefill, or not decode"
            return OrderRefused(reason=OrderRefusal.NOT_CAPABLE, detail=detail)
        fence, held = self._fence(known, stage.name, body.instance, ladder, now_ns)
        moves = self.windows.open_moves(body.instance, now_ns)
        if fence is None and moves and not body.wait:
            fence, held = OrderRefusal.MOVES_OPEN, f"{moves} moves from or to {body.instance} are under way"
        if fence is not None and not body.wait:
            return OrderRefused(reason=fence, detail=held)
        known.ordered[body.instance] = known.homes[body.instance] = body.role
        return OrderAccepted(detail=f"{body.instance} will be {body.role}" + (f", not yet: {held}" if held else ""))

    def _keeps_capable(self, known: ModelRoles, stage: Stage, body: SetRole) -> bool:
        """Whether the stage can prefill and decode once this order and those that wait are carried out."""
        targets = {flip.instance: flip.target for flip in known.open.values()}
        roles = {n: known.roles.get(n, InstanceRole.BOTH) for n in stage.instances} | targets | known.ordered
        instances = tuple(RoleInstance(name=n, role=roles[n]) for n in stage.instances)
        view = RolesView(model=body.model, stage=stage.name, instances=instances)
        return may_take_role(view, body.instance, body.role)

    def give(self, model: str, instance: str, role: InstanceRole | None) -> None:
        """Has an instance that begins by order come with a role; None for the configured one."""
        known = self.of_model(model)
        for held in (known.homes, known.roles, known.ordered):
            held.pop(instance, None)
        if role is not None:
            known.homes[instance] = known.roles[instance] = role

    # for people and checkers

    def snapshot(self) -> dict[str, Any]:
        """Flips and the rung that acts, by model."""
        return {
            model: {
                "rung": str(known.rung),
                "flipping": {stage: f"{flip.instance} to {flip.target}" for stage, flip in known.open.items()},
                "ordered": {name: str(role) for name, role in known.ordered.items()},
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


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
