"""Provisioning: decides how many instances a model has, and has provisioners start and stop them.

An actor of its own, hosted in the coordinator's process. Owns the windows of latencies and what is on order.

| message in | change | messages out |
|---|---|---|
| TimerFired(tick) | samples age; ends and deadlines of orders are noticed; the policy is asked |
Request(StartInstance / StopInstance) per instance, ProvisioningDecided, Log |
| DecisionMade, RequestFinished | a sample, for models that are led | |
| InstanceOrdered | on order until it serves, or is gone | PlanProposed with the role of an order |
| OrderRefused, no responders | the next host is asked; where none is left the order has failed | Request, Log |
| no answer in time | the same host is asked once more, which is safe: orders are idempotent. Then the order has failed;
it may have been carried out after all, so no other host is asked | Request, Log |
| ServicePresence(supervisor) | its host is asked after the configured ones: a machine that joined | |
| SetInstances | an operator's order becomes one per instance, whatever the strategy | Request; OrderAccepted or
OrderRefused when the last is answered |
| KeyChanged(lease) of another holder | the model's windows and orders are forgotten | |
| StopRequested | | Stop |

After a lease was taken the policy's cool-down runs first, so that what the predecessor ordered can appear. An instance
that does not register itself within its limit is given up: stopped, and counted as a failure, which lengthens the
cool-down. One that dies while it drains is gone sooner, no more; its requests go on elsewhere as after any death.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millrace.actor.effects import Effect, Log, Publish, Request, reply
from millrace.contracts.catalog import Role
from millrace.contracts.coordinator import OrderAccepted, OrderRefusal, OrderRefused, SetInstances
from millrace.contracts.local import (
    KeyChanged,
    Replied,
    RequestFailed,
    RequestFailure,
)
from millrace.contracts.message import Body
from millrace.contracts.observers import DecisionMade, ProvisioningDecided, RequestFinished
from millrace.contracts.plan import InstanceRole, Plan, Stage
from millrace.contracts.provisioner import InstanceOrdered, StartInstance, StopInstance
from millrace.contracts.status import InstanceSummary, ServicePresence
from millrace.policies.provisioning import ProvisioningDecision, ProvisioningView
from millrace.policies.provisioning.by_order import (
    ORDER_MAX,
    ScalableInstance,
    ScaleAnswer,
    ScaleQuestion,
    emptying_s,
    scale,
)

from services.coordinator.config import CoordinatorConfig, provisioning_policy
from services.coordinator.fleet import SAMPLES_MAX, Fleet, Order, RegisteredInstance
from services.coordinator.led_models import Controller
from services.coordinator.metrics import ProvisioningMetrics
from services.coordinator.roles import old_plan
from services.coordinator.scaling import WaitingScale

#: An instance that drains may take this much longer than its limit: the worker lingers, the process ends.
STOP_GRACE_NS = 30_000_000_000

#: Hosts that are asked, at most. One that has left answers nothing, and the next is asked.
HOSTS_MAX = 256


class ProvisioningActor(Controller):
    """Starts and stops instances of models that are led here."""

    def __init__(self, config: CoordinatorConfig, *, incarnation: int, metrics: ProvisioningMetrics) -> None:
        """Raises ConfigError where the strategy or its parameters are wrong."""
        super().__init__(config, by="provisioning", incarnation=incarnation)
        self._metrics = metrics
        self._config = config.provisioning
        self._copy_bytes_per_s = config.stages.copy_bytes_per_s
        self._policy, self._parameters = provisioning_policy(config.provisioning)
        self._incarnation = incarnation
        self._fleets: dict[str, Fleet] = {}
        self._hosts = list(config.provisioning.hosts)
        self._orders = 0
        self._said: set[str] = set()

    @property
    def on(self) -> bool:
        return self._config.strategy != "none"

    def _hears(self) -> list[str]:
        """Orders, and requests where a strategy needs them."""
        subjects = [self._subjects.coordinate("*", "scale"), self._subjects.summaries()]
        subjects.append(self._subjects.presences(Role.SUPERVISOR))
        return subjects + ([self._subjects.decisions(), self._subjects.outcomes()] if self.on else [])

    def _on(self, body: Body, reply_to: str, now_ns: int) -> list[Effect]:
        match body:
            case InstanceSummary() as body:
                self._led.on_summary(body)
            case ServicePresence(role=Role.SUPERVISOR, host=host):
                if host and host not in self._hosts and len(self._hosts) < HOSTS_MAX:
                    self._hosts.append(host)
            case DecisionMade() as body:
                if (fleet := self._fleets.get(body.model)) is not None:
                    fleet.hear_decision(body, now_ns)
            case RequestFinished() as body:
                if (fleet := self._fleets.get(body.model)) is not None:
                    fleet.hear_outcome(body, now_ns)
            case KeyChanged() as body:
                model = self._led.on_key(body, now_ns)
                if self._led.lost(model):
                    self._fleets.pop(model, None)
                    self._metrics.models.pop(model, None)
            case SetInstances() as body:
                return self._on_scale(body, reply_to, now_ns)
            case Replied() as body:
                return self._on_answer(body, now_ns)
            case RequestFailed() as body:
                return self._on_failure(body)
        return []

    def _on_tick(self, now_ns: int) -> list[Effect]:
        return [effect for model in self._led.led(now_ns) for effect in self._tick(model, now_ns)]

    def _instances(self, model: str) -> dict[str, RegisteredInstance]:
        serving = {record.instance for record in self._led.serving(model)}
        found = {}
        for record in self._led.registered(model):
            summary = self._led.summary(record)
            draining = summary is not None and summary.draining
            found[record.instance] = RegisteredInstance(record, record.instance in serving, draining, summary)
        return found

    # decisions

    def _tick(self, model: str, now_ns: int) -> list[Effect]:
        if not self.on and model not in self._fleets:
            return []
        fleet = self._fleets.setdefault(model, Fleet(self._policy.initial_state))
        known = self._instances(model)
        serving = {name for name, view in known.items() if view.serving}
        effects = self._settle(fleet, known, serving, now_ns)
        if not self.on:
            return effects
        view = fleet.view(model, known, serving)
        decision, fleet.state = self._policy.decide(view, self._parameters, fleet.state, now_ns)
        self._metrics.models[model] = (view, decision)
        incarnations = {name: known[name].record.incarnation for name in decision.stop}
        return effects + self._carry_out(fleet, view, decision, incarnations, now_ns)

    def _settle(
        self, fleet: Fleet, known: dict[str, RegisteredInstance], serving: set[str], now_ns: int
    ) -> list[Effect]:
        effects: list[Effect] = []
        for order in fleet.take_done(known, serving):
            effects.append(self._end(order, "done", level="info"))
            if order.action == "start":
                self._said.clear()
        for order in fleet.take_late(now_ns):
            effects.append(self._end(order, "late", level="error"))
            if order.action == "start":
                fleet.failures += 1
                effects.append(self._give_up(fleet, order))
        return effects

    def _carry_out(
        self,
        fleet: Fleet,
        view: ProvisioningView,
        decision: ProvisioningDecision,
        incarnations: dict[str, int],
        now_ns: int,
    ) -> list[Effect]:
        limit_s = self._config.drain_limit_s
        orders = [self._new_order(view.model, "start") for _ in range(decision.start)]
        for name in decision.stop:
            orders.append(self._new_order(view.model, "stop", name, incarnations[name], drain_limit_s=limit_s))
        return self._begin(fleet, view, decision, orders, self._config.strategy, now_ns)

    def _begin(
        self,
        fleet: Fleet,
        view: ProvisioningView,
        decision: ProvisioningDecision,
        orders: list[Order],
        by: str,
        now_ns: int,
    ) -> list[Effect]:
        """Tells of a decision and asks provisioners. ``by``: the strategy's name, or ``operator``."""
        if not orders:
            return []
        model, action = view.model, orders[0].action
        body = ProvisioningDecided(
            model=model,
            coordinator=self.name,
            strategy=by,
            action=action,
            count=len(orders),
            instances=list(decision.stop),
            reason=decision.reason,
            serving=len(view.serving),
            starting=view.starting,
            stopping=view.stopping,
            signal_ns=decision.signal_ns,
            utilisation=decision.utilisation,
            at_ns=now_ns,
        )
        fields = {"model": model, "action": action, "count": len(orders), "reason": decision.reason}
        return [
            Publish(subject=self._subjects.provisioning(model), body=body),
            Log(level="info", event="provisioning", fields=fields),
            *(self._ask(fleet, order) for order in orders),
        ]

    # an operator's orders

    def _on_scale(self, body: SetInstances, reply_to: str, now_ns: int) -> list[Effect]:
        """An operator's order; a coordinator that does not lead the model leaves it to the one that does."""
        if not self._led.leads(body.model, now_ns):
            return []
        plan, known = self._led.plan(body.model), self._instances(body.model)
        question = self._question(body, plan, known)
        verdict = scale(question)
        refused = old_plan(body, plan) or self._refusal(body.model)
        if verdict.refusal is not None:
            refused = refused or OrderRefused(reason=verdict.refusal, detail=verdict.detail)
        if refused is not None:
            return reply(reply_to, refused)
        if not verdict.start and not verdict.stop:
            return reply(reply_to, OrderAccepted(detail=f"{verdict.detail}, as asked"))
        limits_s = {each.name: emptying_s(each, bytes_per_s=self._copy_bytes_per_s) for each in question.instances}
        return self._scale(body, verdict, limits_s, known, reply_to, now_ns)

    def _question(
        self, body: SetInstances, plan: Plan | None, known: Mapping[str, RegisteredInstance]
    ) -> ScaleQuestion:
        stages = plan.stages if plan is not None else []
        return ScaleQuestion(
            count=body.count,
            shape=body.shape,
            role=body.role,
            instances=[
                self._scalable(body.model, known[name], stage)
                for stage in stages
                for name in stage.instances
                if name in known
            ],
        )

    def _scalable(self, model: str, view: RegisteredInstance, stage: Stage) -> ScalableInstance:
        record, heard, kv = view.record, view.summary, view.record.kv
        fleet = self._fleets.get(model)
        return ScalableInstance(
            name=record.instance,
            stage=stage.name,
            role=stage.roles.get(record.instance, InstanceRole.BOTH),
            shape=record.shape,
            since_ns=record.incarnation,
            sequences=heard.running if heard is not None else record.max_sequences,
            context_tokens=heard.running_tokens if heard is not None else record.blocks_total * record.block_size,
            token_bytes=kv.block_bytes / max(1, kv.block_tokens) if kv is not None else 0.0,
            stoppable=fleet is None or record.instance not in fleet.unstoppable,
        )

    def _scale(
        self,
        body: SetInstances,
        verdict: ScaleAnswer,
        limits_s: Mapping[str, float | None],
        known: dict[str, RegisteredInstance],
        reply_to: str,
        now_ns: int,
    ) -> list[Effect]:
        """Carries out what an operator's order amounts to; the answer follows when provisioners have answered.

        Args:
            limits_s: How long each of those may take to be empty; None where nothing moves.
        """
        fleet = self._fleets.setdefault(body.model, Fleet(self._policy.initial_state))
        waiter = WaitingScale(reply_to=reply_to)
        orders = [self._new_order(body.model, "start") for _ in range(verdict.start)]
        for name in verdict.stop:
            limit_s = limits_s[name] or self._config.drain_limit_s
            incarnation = known[name].record.incarnation
            orders.append(self._new_order(body.model, "stop", name, incarnation, drain_limit_s=limit_s))
        for order in orders:
            order.shape, order.role, order.waiter = body.shape, body.role, waiter
        waiter.open = {order.name for order in orders}
        waiter.limit_ms = round(1000 * max((order.drain_limit_s for order in orders), default=0.0))
        what = " ".join(filter(None, (str(body.count), body.shape, str(body.role or ""))))
        decision = ProvisioningDecision(start=verdict.start, stop=verdict.stop, reason=f"an operator asked for {what}")
        return self._begin(fleet, fleet.view(body.model, known, set(known)), decision, orders, "operator", now_ns)

    def _refusal(self, model: str) -> OrderRefused | None:
        """Refusal of any operator's order now; None where one is taken."""
        fleet = self._fleets.get(model)
        if fleet is not None and (fleet.asked or fleet.starting or fleet.stopping):
            under_way = [*sorted(fleet.starting), *sorted(fleet.stopping)] or ["an order that is not answered yet"]
            return OrderRefused(reason=OrderRefusal.SCALING, detail=f"under way: {', '.join(under_way)}")
        return None

    # orders

    def _new_order(
        self, model: str, action: str, instance: str = "", incarnation: int = 0, *, drain_limit_s: float = 0.0
    ) -> Order:
        self._orders += 1
        return Order(
            name=f"{self.name}/{self._incarnation}/{self._orders}",
            model=model,
            action=action,
            instance=instance,
            incarnation=incarnation,
            drain_limit_s=drain_limit_s,
        )

    def _give_up(self, fleet: Fleet, order: Order) -> Effect:
        """Ends what did not start; only its own host knows it."""
        stop = self._new_order(order.model, "stop", order.instance)
        stop.host_index = order.host_index
        return self._ask(fleet, stop)

    def _ask(self, fleet: Fleet, order: Order) -> Effect:
        fleet.asked[order.name] = order
        body: StartInstance | StopInstance = StartInstance(order=order.name, model=order.model, shape=order.shape)
        if order.action == "stop":
            body = StopInstance(instance=order.instance, drain_limit_ms=round(order.drain_limit_s * 1000))
        return Request(
            subject=self._subjects.provision(self._hosts[order.host_index], order.action),
            body=body,
            correlation=order.name,
            timeout_ns=_ns(self._config.ask_limit_s),
        )

    def _on_answer(self, replied: Replied, now_ns: int) -> list[Effect]:
        """Handle a provisioner's answer; ignore one about a model that is no longer led."""
        fleet, order = self._asked(replied.correlation)
        if fleet is None or order is None:
            return []
        match replied.body:
            case InstanceOrdered() as body if order.action == "start":
                order.instance = body.instance
                order.deadline_ns = now_ns + _ns(self._config.start_limit_s)
                fleet.starting[body.instance] = order
                effects: list[Effect] = []
                if order.waiter is not None:  # the name may have been another instance's, with another role
                    orders = {body.instance: order.role}
                    effects = [self._proposal(order.model, now_ns, role_orders=orders)]
                return [*effects, *_accepted(order)]
            case InstanceOrdered() as body:
                order.deadline_ns = now_ns + _ns(order.drain_limit_s) + STOP_GRACE_NS
                fleet.stopping[body.instance] = order
                return _accepted(order)
            case OrderRefused() as body:
                return self._refused(fleet, order, body)
            case body:
                return self._next_host(fleet, order, "malformed", f"{type(body).__name__} is no answer")

    def _on_failure(self, body: RequestFailed) -> list[Effect]:
        """No answer. Without one the order may have been carried out: it is repeated under the same name."""
        fleet, order = self._asked(body.correlation)
        if fleet is None or order is None:
            return []
        if body.reason is RequestFailure.TIMEOUT and not order.repeated:
            order.repeated = True
            return [self._ask(fleet, order)]
        if body.reason is RequestFailure.NO_RESPONDERS:
            return self._next_host(fleet, order, str(body.reason), "no provisioner listens there")
        return self._failed(fleet, order, "unanswered", str(body.reason))

    def _refused(self, fleet: Fleet, order: Order, body: OrderRefused) -> list[Effect]:
        shared = body.reason is OrderRefusal.SHARED_PROCESS
        last = order.host_index + 1 >= len(self._hosts)
        if order.action == "stop" and (shared or (last and body.reason is OrderRefusal.UNKNOWN_INSTANCE)):
            fleet.unstoppable[order.instance] = order.incarnation
            return self._failed(fleet, order, str(body.reason), body.detail)
        return self._next_host(fleet, order, str(body.reason), body.detail)

    def _next_host(self, fleet: Fleet, order: Order, outcome: str, detail: str) -> list[Effect]:
        order.host_index += 1
        order.repeated = False
        if order.host_index < len(self._hosts):
            return [self._ask(fleet, order)]
        order.host_index -= 1
        return self._failed(fleet, order, outcome, detail)

    def _failed(self, fleet: Fleet, order: Order, outcome: str, detail: str) -> list[Effect]:
        """The end of an order that nobody carries out; said once per reason until a start succeeds again."""
        self._metrics.orders.add(order.action, outcome)
        if order.waiter is not None:
            return order.waiter.failed(order.name, outcome, detail)
        fleet.failures += order.action == "start"
        key = f"{order.action} {outcome}"
        if key in self._said:
            return []
        self._said.add(key)
        fields = {"model": order.model, "action": order.action, "instance": order.instance, "why": outcome}
        return [Log(level="warning", event="provisioning_failed", fields=fields | {"detail": detail})]

    def _asked(self, correlation: str) -> tuple[Fleet | None, Order | None]:
        for fleet in self._fleets.values():
            if correlation in fleet.asked:
                return fleet, fleet.asked.pop(correlation)
        return None, None

    def _end(self, order: Order, outcome: str, *, level: str) -> Log:
        self._metrics.orders.add(order.action, outcome)
        fields = {"model": order.model, "action": order.action, "instance": order.instance, "outcome": outcome}
        return Log(level=level, event="provisioning_order_ended", fields=fields)

    # for people and checkers

    def snapshot(self) -> dict[str, Any]:
        return {"provisioning": {model: fleet.snapshot() for model, fleet in sorted(self._fleets.items())}}

    def check_invariants(self) -> None:
        most = max(ORDER_MAX, getattr(self._parameters, "instances_max", 0))
        for fleet in self._fleets.values():
            assert len(fleet.starting) <= most, fleet.starting
            assert len(fleet.predicted) <= SAMPLES_MAX
            assert len(fleet.measured) <= SAMPLES_MAX


def _accepted(order: Order) -> list[Effect]:
    return order.waiter.accepted(order.name, order.action, order.instance) if order.waiter is not None else []


def _ns(seconds: float) -> int:
    return round(seconds * 1_000_000_000)
