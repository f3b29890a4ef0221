"""Controls of a model's load that the coordinator owns, in the order of the ladder: roles, provisioning, stages.

Part of the coordinator's actor. It routes what is heard to those who need it, and lets each act only where the ladder
(`ladder.py`) does not hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from millrace.actor.effects import Effect, Publish, Reply, Subscribe
from millrace.contracts.broker import LoadReported, LoadsReported
from millrace.contracts.catalog import Role
from millrace.contracts.coordinator import (
    LadderReported,
    OrderAccepted,
    OrderRefusal,
    OrderRefused,
    SetInstances,
    SetRole,
)
from millrace.contracts.local import Replied
from millrace.contracts.observers import DecisionMade, RequestFinished
from millrace.contracts.plan import InstanceRole, Plan, Stage
from millrace.contracts.status import InstanceRecord, InstanceSummary, ServicePresence
from millrace.contracts.subjects import Subjects
from millrace.policies.provisioning.by_order import ScalableInstance, ScaleQuestion, emptying_s, scale
from millrace.policies.roles import Scenario

from services.coordinator.ladder import APART_NS, LadderView, scaling_held
from services.coordinator.planning import Planning
from services.coordinator.priorities import Priorities
from services.coordinator.provisioning import Provisioning
from services.coordinator.roles import Roles
from services.coordinator.state import RegisteredInstance

#: Worst scenario first.
_WORST = (Scenario.EXTREME, Scenario.IMBALANCED, Scenario.NORMAL, Scenario.UNKNOWN)


class LoadControls:
    """Roles, provisioning and stages of the models that are led here.

    Attributes:
        roles: Who does what.
        provisioning: How many there are.
        planning: Which stages there are.
        priorities: Whose decodes come first.
    """

    def __init__(
        self,
        *,
        planning: Planning,
        provisioning: Provisioning,
        roles: Roles,
        name: str,
        subjects: Subjects,
    ) -> None:
        self.planning = planning
        self.provisioning = provisioning
        self.roles = roles
        self.priorities = Priorities(subjects)
        self._name = name
        self._subjects = subjects

    # what is heard

    def start(self) -> list[Effect]:
        """Listens to orders, and to what the policies need."""
        subjects = [
            self._subjects.coordinate("*", "role"),
            self._subjects.coordinate("*", "scale"),
            self._subjects.presences(Role.MIGRATOR),
            self._subjects.loads(),
        ]
        if self.provisioning.on or self.roles.observes or self.planning.learns:
            subjects += [self._subjects.decisions(), self._subjects.outcomes()]
        return [Subscribe(subject=subject) for subject in subjects]

    def hear(self, body: DecisionMade | RequestFinished | LoadReported | LoadsReported, now_ns: int) -> list[Effect]:
        """A placement, an end, or the load that a broker tells."""
        match body:
            case DecisionMade():
                self.planning.on_decision(body, now_ns)
                self.roles.windows.on_decision(body, now_ns)
                return self.provisioning.on_decision(body, now_ns)
            case RequestFinished():
                self.planning.on_outcome(body)
                self.roles.windows.on_outcome(body)
                return self.provisioning.on_outcome(body, now_ns)
            case LoadReported():
                self.roles.windows.on_load(body, now_ns)
                return []
            case LoadsReported():
                for load in body.loads:
                    self.roles.windows.on_load(load, now_ns)
                return []

    def on_summary(self, body: InstanceSummary) -> None:
        """The load of a registered instance."""
        self.planning.on_summary(body)
        self.roles.windows.on_summary(body)

    def on_migrator(self, body: ServicePresence, now_ns: int) -> None:
        """Sequences on their way."""
        self.roles.windows.on_migrator(body, now_ns)

    # decisions

    def next_plan(self, model: str, plan: Plan | None, records: Sequence[InstanceRecord], now_ns: int) -> Plan | None:
        """The plan to be written, with the roles in force; None where the one in force says the same."""
        written = self.planning.next_plan(
            model, plan, records, now_ns, roles=lambda names: self.roles.of_stage(model, plan, names, now_ns)
        )
        orders = dict(self.roles.of_model(model).homes)
        if written is not None:
            return msgspec.structs.replace(written, role_orders=orders)
        if plan is None or plan.role_orders == orders:
            return None
        told = {"epoch": plan.epoch + 1, "coordinator": self._name, "role_orders": orders}
        return msgspec.structs.replace(plan, reason="an operator ordered roles", **told)

    def decide(
        self,
        model: str,
        plan: Plan | None,
        instances: Sequence[RegisteredInstance],
        now_ns: int,
    ) -> list[Effect]:
        """Lets each rung look at one led model, the fastest first.

        Args:
            model: Its name.
            plan: In force.
            instances: All that are registered for it.
            now_ns: Unix ns.
        """
        serving = [view.record for view in instances if view.serving]
        scaling = self.provisioning.ladder_view(model)
        effects = self.roles.tick(model, plan, serving, scaling, now_ns)
        ladder = self.roles.ladder(model, scaling)
        effects += self.priorities.tick(model, ladder.decisions, serving)
        effects += self.provisioning.tick(model, instances, now_ns, held=scaling_held(ladder, now_ns))
        if not ladder.flipping:
            effects += self.planning.tick(model, plan, serving, now_ns)
        return [*effects, self._told(model, ladder, now_ns)]

    def forget(self, model: str) -> None:
        """The lease of a model is somebody else's."""
        self.planning.forget(model)
        self.provisioning.forget(model)
        self.roles.forget(model)
        self.priorities.forget(model)

    def _told(self, model: str, ladder: LadderView, now_ns: int) -> Effect:
        known = self.roles.of_model(model)
        worst = min(ladder.decisions, key=lambda each: _WORST.index(each.scenario), default=None)
        body = LadderReported(
            model=model,
            coordinator=self._name,
            at_ns=now_ns,
            policy=self.roles.policy,
            rung=str(known.rung),
            scenario=str(worst.scenario) if worst is not None and self.roles.observes else "",
            prefill=worst.prefill if worst is not None else 0.0,
            decode=worst.decode if worst is not None else 0.0,
            flipping={flip.instance: flip.target for flip in known.open.values()},
            flips=known.counts["begun"],
            reason=worst.reason if worst is not None else "",
            last=known.last,
            flips_done=known.counts["done"],
            flips_given_up=known.counts["given_up"],
            ordered=dict(known.ordered),
            held=known.held if known.ordered else "",
            step_budgets=dict(self.priorities.of_model(model)),
        )
        return Publish(subject=self._subjects.ladder(model), body=body)

    # orders

    def on_order(self, body: SetRole, plan: Plan | None, now_ns: int) -> OrderAccepted | OrderRefused:
        """An operator's order to a model that is led here."""
        if (old := _old(body, plan)) is not None:
            return old
        ladder = self.roles.ladder(body.model, self.provisioning.ladder_view(body.model))
        return self.roles.order(body, plan, ladder, now_ns)

    def on_scale(
        self, body: SetInstances, plan: Plan | None, instances: Sequence[RegisteredInstance], reply_to: str, now_ns: int
    ) -> list[Effect]:
        """An operator's order to have more or fewer instances of a model that is led here."""
        question = self._question(body, plan, instances)
        verdict = scale(question)
        refused = _old(body, plan) or self._scaling_refused(body.model, now_ns) or self.provisioning.refusal(body.model)
        if verdict.refusal is not None:
            refused = refused or OrderRefused(reason=verdict.refusal, detail=verdict.detail)
        if refused is not None:
            return answer(reply_to, refused)
        if not verdict.start and not verdict.stop:
            return answer(reply_to, OrderAccepted(detail=f"{verdict.detail}, as asked"))
        bytes_per_s = self.planning.copy_bytes_per_s
        limits_s = {each.name: emptying_s(each, bytes_per_s=bytes_per_s) for each in question.instances}
        return self.provisioning.scale(body, verdict, limits_s, instances, reply_to, now_ns)

    def on_answer(self, replied: Replied, now_ns: int) -> list[Effect]:
        """A provisioner's answer. Instances that an operator has ordered get their roles."""
        effects = self.provisioning.on_answer(replied, now_ns)
        for model, name, role in self.provisioning.take_started():
            self.roles.give(model, name, role)
        return effects

    def _scaling_refused(self, model: str, now_ns: int) -> OrderRefused | None:
        """No scaling while a flip is under way, and for a while after one."""
        ladder = self.roles.ladder(model, self.provisioning.ladder_view(model))
        reason = OrderRefusal.FLIP_OPEN if ladder.flipping else OrderRefusal.FLIPPED_LATELY
        held = scaling_held(msgspec.structs.replace(ladder, decisions=()), now_ns)
        return OrderRefused(reason=reason, detail=f"{held}; {APART_NS // 10**9} s apart") if held else None

    def _question(
        self, body: SetInstances, plan: Plan | None, instances: Sequence[RegisteredInstance]
    ) -> ScaleQuestion:
        stages = plan.stages if plan is not None else []
        known = {view.record.instance: view for view in instances}
        return ScaleQuestion(
            count=body.count,
            shape=body.shape,
            role=body.role,
            instances=[
                self._scalable(known[name], stage) for stage in stages for name in stage.instances if name in known
            ],
        )

    def _scalable(self, view: RegisteredInstance, stage: Stage) -> ScalableInstance:
        record, summary = view.record, view.summary
        heard = summary if summary is not None and summary.incarnation == record.incarnation else None
        kv = record.kv
        return ScalableInstance(
            name=record.instance,
            stage=stage.name,
            role=stage.roles.get(record.instance, InstanceRole.BOTH),
            shape=record.shape,
            since_ns=record.incarnation,
            sequences=heard.running if heard is not None else record.max_sequences,
            context_tokens=heard.running_tokens if heard is not None else record.blocks_total * record.block_size,
            token_bytes=kv.block_bytes / max(1, kv.block_tokens) if kv is not None else 0.0,
            stoppable=self.provisioning.is_stoppable(record.model, record.instance),
        )

    def snapshot(self) -> dict[str, Any]:
        """For people and checkers."""
        return {
            "roles": self.roles.snapshot(),
            "priorities": self.priorities.snapshot(),
            "provisioning": self.provisioning.snapshot(),
            "planning": self.planning.snapshot(),
        }

    def check(self) -> None:
        """Raises AssertionError where a bound does not hold."""
        self.roles.check()
        self.provisioning.check()
        self.planning.check()


def _old(body: SetRole | SetInstances, plan: Plan | None) -> OrderRefused | None:
    """A refusal where the order was made on a plan that is not in force any more."""
    if plan is None or not body.plan_epoch or body.plan_epoch >= plan.epoch:
        return None
    detail = f"made on plan {body.plan_epoch}; {plan.epoch} is in force"
    return OrderRefused(reason=OrderRefusal.OLD_PLAN, detail=detail)


def answer(reply_to: str, body: OrderAccepted | OrderRefused) -> list[Effect]:
    """The answer to whoever waits for one."""
    return [Reply(to=reply_to, body=body)] if reply_to else []
