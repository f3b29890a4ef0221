"""Roles of instances: carries changes out one after the other, through BOTH, and proposes the roles of each moment.

An actor of its own, hosted in the coordinator's process. A role changes because an operator ordered it, because the
configuration gives another one, or because a policy wants it (libs/millrace/policies/roles; none does by default).
Owns, per model that is led, the flip under way in each stage, and roles that are not the ordered or configured ones.

| message in | change | messages out |
|---|---|---|
| SetRole | the role that an operator wants, as soon as fences let it | OrderAccepted, OrderRefused; PlanProposed |
| KeyChanged(lease / plan) | roles of a model that is led for the first time are taken over | PlanProposed |
| TimerFired(tick) | a flip begins, goes on, or is given up | PlanProposed |
| ServicePresence(migrator), InstanceSummary | moves under way, decodes | |
| StopRequested | | Stop |

A flip: the instance does BOTH first, which every message under way allows: it takes new requests and keeps what it has.
The last hop waits until nothing moves away from it, and one to PREFILL until no decode runs there or arrives, or
``drain_s`` is over; the rest is handed off after it. Where that does not come about within HOP_NS it stays with BOTH.

Invariants: at most one flip under way per stage; nothing is flipped twice within ``gap_s``; a flip leaves a stage that
can prefill and decode.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from millrace.actor.effects import Effect, Log, reply
from millrace.contracts.catalog import Role
from millrace.contracts.coordinator import OrderAccepted, OrderRefusal, OrderRefused, SetInstances, SetRole
from millrace.contracts.local import KeyChanged
from millrace.contracts.message import Body
from millrace.contracts.plan import InstanceRole, Plan, Stage
from millrace.contracts.status import InstanceSummary, LoadIndicators, ServicePresence
from millrace.policies.roles import ROLE_POLICIES, Flip, RoleInstance, RolesView, may_take_role

from services.coordinator.config import CoordinatorConfig
from services.coordinator.led_models import Controller
from services.coordinator.plan_writing import capable, role_of, roles_of

#: A last hop that its conditions do not allow within this time is given up.
HOP_NS = 30_000_000_000

#: A policy flips nothing for so long after instances joined or left: the effect of that must be seen first.
APART_NS = 30_000_000_000

#: What migrators told of moves is believed for so long; they tell it every second.
MOVES_NS = 2_500_000_000

#: Summaries that a policy sees, and how many of an instance are kept.
WINDOW_NS = 5_000_000_000
SUMMARIES_MAX = 64


@dataclass(kw_only=True)
class OpenFlip:
    """A flip under way: the instance does BOTH.

    Attributes:
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
        roles: Of instances that shall not have their home role now: orders that wait, flips under way, flips of a
            policy.
        ordered: Orders that were not carried out yet.
        open: Flip under way, by stage.
        flipped_ns: Last change, by instance; by stage under the stage's name with a slash before it.
        states: The policy's, by stage.
        counts: Flips begun, done, given up.
        last: The last flip and its reason.
    """

    roles: dict[str, InstanceRole] = field(default_factory=dict)
    ordered: dict[str, InstanceRole] = field(default_factory=dict)
    open: dict[str, OpenFlip] = field(default_factory=dict)
    flipped_ns: dict[str, int] = field(default_factory=dict)
    states: dict[str, Any] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    last: str = ""


class RolesActor(Controller):
    """Changes roles of models that are led here."""

    def __init__(self, config: CoordinatorConfig, *, incarnation: int) -> None:
        """Raises ConfigError where the policy or its parameters are wrong."""
        super().__init__(config, by="roles", incarnation=incarnation)
        self._config = config.flips
        self._configured = config.roles
        self._policy, self._parameters = ROLE_POLICIES.choose(
            config.flips.policy, config.flips.parameters, table="flips."
        )
        self._models: dict[str, ModelRoles] = {}
        self._moves: dict[tuple[str, str], tuple[int, int]] = {}  # (migrator, instance): (heard, sequences)
        self._summaries: dict[str, deque[InstanceSummary]] = {}

    def _hears(self) -> list[str]:
        subjects = self._subjects
        return [subjects.coordinate("*", "role"), subjects.presences(Role.MIGRATOR), subjects.summaries()]

    def _on(self, body: Body, reply_to: str, now_ns: int) -> list[Effect]:
        match body:
            case InstanceSummary() as body:
                self._on_summary(body)
            case ServicePresence(role=Role.MIGRATOR) as body:
                self._on_migrator(body, now_ns)
            case SetRole() as body:
                return self._on_order(body, reply_to, now_ns)
            case KeyChanged() as body:
                return self._on_key(body, now_ns)
        return []

    # what is heard

    def _on_summary(self, body: InstanceSummary) -> None:
        if self._led.on_summary(body) is not None and self._policy.observes:
            self._summaries.setdefault(body.instance, deque(maxlen=SUMMARIES_MAX)).append(body)

    def _on_migrator(self, body: ServicePresence, now_ns: int) -> None:
        """Sequences that leave each instance; those that arrive, its own summary tells."""
        self._moves = {key: told for key, told in self._moves.items() if key[0] != body.name}
        for each in body.moving:
            if each.instance in self._led.records:
                self._moves[body.name, each.instance] = (now_ns, each.leaving)

    def _on_key(self, body: KeyChanged, now_ns: int) -> list[Effect]:
        """Takes the roles over of a model that is led for the first time."""
        model = self._led.on_key(body, now_ns)
        plan = self._led.plan(model)
        if self._led.lost(model):
            self._models.pop(model, None)
        if plan is None or model in self._models or not self._led.leads(model, now_ns):
            return []
        known = self._models[model] = ModelRoles()
        before = roles_of(plan)
        for stage in plan.stages:
            homes = capable({name: self._home(known, plan, name) for name in stage.instances}, before)
            known.roles |= {name: before[name] for name in stage.instances if before[name] is not homes[name]}
        known.ordered = {n: role for n, role in plan.role_orders.items() if n in known.roles}
        for stage in plan.stages if plan.epoch > 1 else ():  # the predecessor's last flip is not known
            known.flipped_ns[f"/{stage.name}"] = now_ns
        return [self._propose(model, known, now_ns)]

    def _home(self, known: ModelRoles, plan: Plan, name: str) -> InstanceRole:
        return known.ordered.get(name) or plan.role_orders.get(name) or role_of(name, self._configured)

    # decisions

    def _on_tick(self, now_ns: int) -> list[Effect]:
        self._summaries = {name: told for name, told in self._summaries.items() if name in self._led.records}
        self._moves = {key: told for key, told in self._moves.items() if now_ns - told[0] < MOVES_NS}
        effects: list[Effect] = []
        for model in self._led.led(now_ns):
            plan, known = self._led.plan(model), self._models.get(model)
            if plan is None or known is None:
                continue
            before = dict(known.roles)
            self._tidy(known, plan)
            for stage in plan.stages:
                effects += self._tick_stage(known, model, plan, stage, now_ns)
            if known.roles != before:
                effects.append(self._propose(model, known, now_ns))
        return effects

    def _tidy(self, known: ModelRoles, plan: Plan) -> None:
        """Forgets orders that are carried out and stand in the plan, and roles that are the home role."""
        under_way = {flip.instance for flip in known.open.values()}
        for name, role in list(known.ordered.items()):
            if name not in under_way and known.roles.get(name, role) is role and plan.role_orders.get(name) is role:
                del known.ordered[name]
        for name in [name for name in known.roles if name not in under_way]:
            if known.roles[name] is self._home(known, plan, name):
                del known.roles[name]

    def _tick_stage(self, known: ModelRoles, model: str, plan: Plan, stage: Stage, now_ns: int) -> list[Effect]:
        effects = self._go_on(known, plan, stage, now_ns)
        view = self._view(known, model, plan, stage, now_ns)
        ordered = self._ordered(known, view)
        state = known.states.get(stage.name, self._policy.initial_state)
        decision, known.states[stage.name] = self._policy.decide(view, self._parameters, state, now_ns)
        changed_ns = self._led.changed_ns(model)
        apart = not self._policy.observes or not changed_ns or now_ns - changed_ns >= APART_NS
        if stage.name in known.open:
            return effects
        for flip in ordered or (decision.flips if apart else ()):
            if not self._fence(known, stage.name, flip.instance, now_ns) and may_take_role(
                view, flip.instance, flip.role
            ):
                reason = "ordered by an operator" if ordered else decision.reason
                return effects + self._begin(known, plan, stage.name, flip, reason, now_ns)
        return effects

    def _view(self, known: ModelRoles, model: str, plan: Plan, stage: Stage, now_ns: int) -> RolesView:
        names = [name for name in stage.instances if name in self._led.records]
        instances = tuple(self._instance(known, plan, name, now_ns) for name in names)
        return RolesView(model=model, stage=stage.name, instances=instances)

    def _instance(self, known: ModelRoles, plan: Plan, name: str, now_ns: int) -> RoleInstance:
        flip = next((flip for flip in known.open.values() if flip.instance == name), None)
        home = self._home(known, plan, name)
        told = tuple(s for s in self._summaries.get(name, ()) if now_ns - s.at_ns <= WINDOW_NS)
        return RoleInstance(
            name=name,
            role=flip.target if flip is not None else known.roles.get(name, home),
            home=home,
            movable=flip is None and self._rested(known, name, now_ns),
            record=self._led.records[name] if self._policy.observes else None,
            summaries=told,
        )

    def _rested(self, known: ModelRoles, key: str, now_ns: int) -> bool:
        before_ns = known.flipped_ns.get(key)
        return before_ns is None or now_ns - before_ns >= _ns(self._config.gap_s)

    def _ordered(self, known: ModelRoles, view: RolesView) -> list[Flip]:
        """Orders that wait. One whose flip was given up is among them again."""
        under_way = {flip.instance for flip in known.open.values()}
        waiting = [each for each in view.instances if each.name in known.ordered and each.name not in under_way]
        return [Flip(each.name, each.home) for each in waiting if each.role is not each.home]

    def _fence(self, known: ModelRoles, stage: str, instance: str, now_ns: int) -> str:
        """Reason that holds a flip of an instance back now; empty where nothing does."""
        if (flip := known.open.get(stage)) is not None:
            return f"{flip.instance} is on its way to {flip.target}"
        for key, who in ((instance, instance), (f"/{stage}", "another one of its stage")):
            if not self._rested(known, key, now_ns):
                ago_s = (now_ns - known.flipped_ns[key]) / 1e9
                return f"{who} was flipped {ago_s:.0f} s ago; {self._config.gap_s - ago_s:.0f} s to wait"
        return ""

    # flips

    def _begin(self, known: ModelRoles, plan: Plan, stage: str, flip: Flip, reason: str, now_ns: int) -> list[Effect]:
        before = known.roles.get(flip.instance) or self._home(known, plan, flip.instance)
        known.roles[flip.instance] = InstanceRole.BOTH
        known.flipped_ns[flip.instance] = known.flipped_ns[f"/{stage}"] = now_ns
        known.counts["begun"] += 1
        known.last = f"{flip.instance} from {before} to {flip.role}: {reason}"
        known.open[stage] = OpenFlip(instance=flip.instance, target=flip.role, since_ns=now_ns)
        fields = {"stage": stage, "instance": flip.instance, "before": str(before), "role": str(flip.role)}
        effects: list[Effect] = [Log(level="info", event="flip_begun", fields=fields | {"reason": reason})]
        if flip.role is InstanceRole.BOTH:
            effects += self._end(known, stage, "done", now_ns)
        return effects

    def _go_on(self, known: ModelRoles, plan: Plan, stage: Stage, now_ns: int) -> list[Effect]:
        """The last hop of the flip under way, where it may be done; its end where it cannot."""
        flip = known.open.get(stage.name)
        if flip is None:
            return []
        if not flip.shown_ns and flip.instance not in stage.roles:
            flip.shown_ns = now_ns
        late = now_ns - flip.since_ns >= HOP_NS
        if flip.instance not in stage.instances or late or not self._capable(known, plan, stage, flip):
            return self._end(known, stage.name, "given_up", now_ns)
        if not flip.shown_ns or self._drains(flip, now_ns) or self._leaving(flip.instance, now_ns):
            return []
        return self._end(known, stage.name, "done", now_ns)

    def _drains(self, flip: OpenFlip, now_ns: int) -> bool:
        """Whether it is too soon for the last hop; decodes of one that is to prefill may end there for a while. Who
        arrives at one that is to decode suits it: under load somebody always does.
        """
        done_both_ns = now_ns - flip.shown_ns
        settled = done_both_ns >= _ns(self._config.settle_s)
        if flip.target is not InstanceRole.PREFILL or done_both_ns >= _ns(self._config.drain_s):
            return not settled
        told = self._indicators(flip.instance)
        return not settled or (told is not None and told.decode.running + told.decode.moving > 0)

    def _capable(self, known: ModelRoles, plan: Plan, stage: Stage, flip: OpenFlip) -> bool:
        roles = {name: known.roles.get(name) or self._home(known, plan, name) for name in stage.instances}
        return _is_capable([*(roles | {flip.instance: flip.target}).values()])

    def _end(self, known: ModelRoles, stage: str, outcome: str, now_ns: int) -> list[Effect]:
        flip = known.open.pop(stage)
        if outcome == "done":
            known.roles[flip.instance] = flip.target
        known.counts[outcome] += 1
        known.flipped_ns[flip.instance] = known.flipped_ns[f"/{stage}"] = now_ns
        fields = {"stage": stage, "instance": flip.instance, "role": str(flip.target), "outcome": outcome}
        fields["took_s"] = f"{(now_ns - flip.since_ns) / 1e9:.1f}"
        return [Log(level="info", event="flip_ended", fields=fields)]

    def _indicators(self, instance: str) -> LoadIndicators | None:
        summary = self._led.summaries.get(instance)
        return summary.indicators if summary is not None else None

    def _leaving(self, instance: str, now_ns: int) -> int:
        """Sequences on their way from an instance."""
        told = [n for (_, name), (at_ns, n) in self._moves.items() if name == instance and now_ns - at_ns < MOVES_NS]
        indicators = self._indicators(instance)
        return max([*told, indicators.prefill.moving if indicators is not None else 0])

    # orders

    def _on_order(self, body: SetRole, reply_to: str, now_ns: int) -> list[Effect]:
        """An operator's order; a coordinator that does not lead the model leaves it to the one that does."""
        plan, known = self._led.plan(body.model), self._models.get(body.model)
        if plan is None or known is None or not self._led.leads(body.model, now_ns):
            return []
        refused = old_plan(body, plan) or self._refusal(body, plan, known)
        if refused is not None:
            return reply(reply_to, refused)
        stage = next(s for s in plan.stages if body.instance in s.instances)
        held = self._fence(known, stage.name, body.instance, now_ns)
        known.roles.setdefault(body.instance, roles_of(plan)[body.instance])
        known.ordered[body.instance] = body.role
        accepted = OrderAccepted(detail=f"{body.instance} will be {body.role}" + (f", not yet: {held}" if held else ""))
        orders = {body.instance: body.role}
        return [self._propose(body.model, known, now_ns, orders), *reply(reply_to, accepted)]

    def _refusal(self, body: SetRole, plan: Plan, known: ModelRoles) -> OrderRefused | None:
        stage = next((s for s in plan.stages if body.instance in s.instances), None)
        if stage is None:
            detail = f"no {body.instance} in the plan of {body.model}"
            return OrderRefused(reason=OrderRefusal.UNKNOWN_INSTANCE, detail=detail)
        targets = {flip.instance: flip.target for flip in known.open.values()}
        roles = {n: targets.get(n) or self._target(known, plan, n) for n in stage.instances} | {
            body.instance: body.role
        }
        if not _is_capable([*roles.values()]):
            detail = f"with {body.instance} as {body.role} its stage could not prefill, or not decode"
            return OrderRefused(reason=OrderRefusal.NOT_CAPABLE, detail=detail)
        return None

    def _target(self, known: ModelRoles, plan: Plan, name: str) -> InstanceRole:
        """Role of an instance once the orders that wait are carried out."""
        home = self._home(known, plan, name)
        return home if name in known.ordered else known.roles.get(name, home)

    def _propose(
        self,
        model: str,
        known: ModelRoles,
        now_ns: int,
        orders: dict[str, InstanceRole] | None = None,
    ) -> Effect:
        return self._proposal(model, now_ns, roles=dict(sorted(known.roles.items())), role_orders=orders or {})

    def snapshot(self) -> dict[str, Any]:
        told = {
            model: {
                "flipping": {stage: f"{flip.instance} to {flip.target}" for stage, flip in known.open.items()},
                "ordered": {name: str(role) for name, role in sorted(known.ordered.items())},
                "counts": dict(sorted(known.counts.items())),
                "last": known.last,
            }
            for model, known in sorted(self._models.items())
        }
        return {"roles": told}

    def check_invariants(self) -> None:
        for known in self._models.values():
            for flip in known.open.values():
                assert known.roles.get(flip.instance) is InstanceRole.BOTH, f"{flip.instance} is flipped past BOTH"


def old_plan(body: SetRole | SetInstances, plan: Plan | None) -> OrderRefused | None:
    """A refusal where the order was made on a plan that is not in force any more."""
    if plan is None or not body.plan_epoch or body.plan_epoch >= plan.epoch:
        return None
    detail = f"made on plan {body.plan_epoch}; {plan.epoch} is in force"
    return OrderRefused(reason=OrderRefusal.OLD_PLAN, detail=detail)


def _is_capable(roles: Sequence[InstanceRole]) -> bool:
    return any(r is not InstanceRole.DECODE for r in roles) and any(r is not InstanceRole.PREFILL for r in roles)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
