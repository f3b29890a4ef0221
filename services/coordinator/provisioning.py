"""Provisioning: looks at the latency of each led model, decides by policy, and has provisioners start and stop
instances.

Part of the coordinator's actor, which calls it; it owns the windows of latencies and what is on order.

| what happened | change | effects |
|---|---|---|
| a tick, for a model whose lease is held | samples age; ends and deadlines of orders are noticed; the policy is asked |
Request(StartInstance / StopInstance) per instance, ProvisioningDecided, Log |
| DecisionMade, RequestFinished | a sample, for models that are led | |
| InstanceStarting, InstanceStopping | on order until it serves, or is gone | |
| ProvisionRefused, no responders | the next host is asked; where none is left the order has failed | Request, Log |
| no answer in time | the same host is asked once more, which is safe: orders are idempotent. Then the order has failed;
it may have been carried out after all, so no other host is asked | Request, Log |
| SetInstances, by `load_controls.py` | an order becomes one per instance, whatever the strategy | Request; Reply
when the last is answered |
| the lease is lost | the model's windows and orders are forgotten | |

After a lease was taken the policy's cool-down runs first, so that what the predecessor ordered can appear. An instance
that does not register itself within its limit is given up: stopped, and counted as a failure, which lengthens the
cool-down. One that dies while it drains is gone sooner, no more; its requests go on elsewhere as after any death.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from millrace.actor.effects import Effect, Log, Publish, Request, Subscribe
from millrace.contracts.coordinator import OrderRefusal, OrderRefused, SetInstances
from millrace.contracts.local import Replied, RequestFailed, RequestFailure
from millrace.contracts.observers import DecisionMade, RequestFinished
from millrace.contracts.plan import InstanceRole
from millrace.contracts.provisioner import (
    InstanceStarting,
    InstanceStopping,
    ProvisionRefusal,
    ProvisionRefused,
    StartInstance,
    StopInstance,
)
from millrace.contracts.subjects import Subjects
from millrace.policies.provisioning import ProvisioningDecision, ProvisioningView
from millrace.policies.provisioning.by_order import ORDER_MAX, ScaleAnswer

from services.coordinator.config import ProvisioningConfig, provisioning_policy
from services.coordinator.fleet import SAMPLES_MAX, Fleet, Order, decided
from services.coordinator.ladder import LadderView
from services.coordinator.metrics import ModelFigures, ProvisioningFigures
from services.coordinator.scaling import ScaleOrders, WaitingScale
from services.coordinator.state import RegisteredInstance

#: An instance that drains may take this much longer than its limit: the worker lingers, the process ends.
STOP_GRACE_NS = 30_000_000_000

#: Marks answers that are provisioning's among all that the actor gets.
PREFIX = "provision/"


class Provisioning:
    """Sole owner of what is on order.

    Attributes:
        figures: What is counted.
    """

    def __init__(self, config: ProvisioningConfig, *, name: str, incarnation: int, subjects: Subjects) -> None:
        """Raises ConfigError where the strategy or its parameters are wrong."""
        self.figures = ProvisioningFigures()
        self._config = config
        self._policy, self._parameters = provisioning_policy(config)
        self._name = name
        self._incarnation = incarnation
        self._subjects = subjects
        self._fleets: dict[str, Fleet] = {}
        self._orders = 0
        self._said: set[str] = set()
        self._scaling = ScaleOrders()
        self._started: list[tuple[str, str, InstanceRole | None]] = []

    @property
    def on(self) -> bool:
        """Whether there is anything to do."""
        return self._config.strategy != "none"

    def start(self) -> list[Effect]:
        """Listens to decisions and outcomes, where a strategy needs them."""
        subjects = [self._subjects.decisions(), self._subjects.outcomes()] if self.on else []
        return [Subscribe(subject=subject) for subject in subjects]

    # what is heard

    def on_decision(self, body: DecisionMade, now_ns: int) -> list[Effect]:
        """A placement. That of a model that is not led here counts for nothing."""
        if (fleet := self._fleets.get(body.model)) is not None:
            fleet.hear_decision(body, now_ns)
        return []

    def on_outcome(self, body: RequestFinished, now_ns: int) -> list[Effect]:
        """An end, likewise."""
        if (fleet := self._fleets.get(body.model)) is not None:
            fleet.hear_outcome(body, now_ns)
        return []

    def forget(self, model: str) -> None:
        """The lease is somebody else's: so are decisions, and what was ordered."""
        self._fleets.pop(model, None)
        self.figures.models.pop(model, None)

    # decisions

    def tick(self, model: str, instances: Iterable[RegisteredInstance], now_ns: int, *, held: str = "") -> list[Effect]:
        """Looks at one led model and its instances.

        Args:
            model: Its name.
            instances: All that are registered for it.
            now_ns: Unix ns.
            held: Why nothing new may be ordered now; empty where it may.
        """
        if not self.on and model not in self._fleets:
            return []
        fleet = self._fleets.setdefault(model, Fleet(self._policy.initial_state))
        known = {view.record.instance: view for view in instances}
        serving = {name for name, view in known.items() if view.serving}
        fleet.serving = len(serving)
        effects = self._settle(fleet, known, serving, now_ns)
        if held or not self.on:
            return effects
        view = fleet.view(model, known, serving)
        decision, fleet.state = self._policy.decide(view, self._parameters, fleet.state, now_ns)
        self._show(model, view, decision)
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
        self.figures.decisions[model, action] += 1
        body = decided(view, decision, orders, by, coordinator=self._name, now_ns=now_ns)
        fields = {"model": model, "action": action, "count": len(orders), "reason": decision.reason}
        fleet.scaled_ns = now_ns
        return [
            Publish(subject=self._subjects.provisioning(model), body=body),
            Log(level="info", event="provisioning", fields=fields),
            *(self._ask(fleet, order) for order in orders),
        ]

    # an operator's orders

    def is_stoppable(self, model: str, instance: str) -> bool:
        """Whether no provisioner has said that it cannot stop the instance."""
        fleet = self._fleets.get(model)
        return fleet is None or instance not in fleet.unstoppable

    def scale(
        self,
        body: SetInstances,
        answer: ScaleAnswer,
        limits_s: Mapping[str, float | None],
        instances: Iterable[RegisteredInstance],
        reply_to: str,
        now_ns: int,
    ) -> list[Effect]:
        """Carries out what an operator's order amounts to; the answer follows when provisioners have answered.

        Args:
            body: The order.
            answer: Instances to start or to stop.
            limits_s: How long each of those may take to be empty; None where nothing moves.
            instances: All that are registered for the model.
            reply_to: Who waits.
            now_ns: Unix ns.
        """
        fleet = self._fleets.setdefault(body.model, Fleet(self._policy.initial_state))
        known = {view.record.instance: view for view in instances}
        waiter = f"{self._incarnation}/{self._orders}"
        orders = [self._new_order(body.model, "start") for _ in range(answer.start)]
        for name in answer.stop:
            limit_s = limits_s[name] or self._config.drain_limit_s
            incarnation = known[name].record.incarnation
            orders.append(self._new_order(body.model, "stop", name, incarnation, drain_limit_s=limit_s))
        for order in orders:
            order.shape, order.role, order.waiter = body.shape, body.role, waiter
        limit_ms = round(1000 * max((order.drain_limit_s for order in orders), default=0.0))
        names = {order.name for order in orders}
        self._scaling.begin(waiter, WaitingScale(reply_to=reply_to, open=names, limit_ms=limit_ms))
        what = " ".join(filter(None, (str(body.count), body.shape, str(body.role or ""))))
        decision = ProvisioningDecision(start=answer.start, stop=answer.stop, reason=f"an operator asked for {what}")
        return self._begin(fleet, fleet.view(body.model, known, set(known)), decision, orders, "operator", now_ns)

    def refusal(self, model: str) -> OrderRefused | None:
        """Refusal of any operator's order now; None where one is taken."""
        fleet = self._fleets.get(model)
        if fleet is not None and (fleet.asked or fleet.starting or fleet.stopping):
            under_way = [*sorted(fleet.starting), *sorted(fleet.stopping)] or ["an order that is not answered yet"]
            return OrderRefused(reason=OrderRefusal.SCALING, detail=f"under way: {', '.join(under_way)}")
        if self._scaling.full:
            return OrderRefused(reason=OrderRefusal.SCALING, detail="too many orders wait for provisioners")
        return None

    def take_started(self) -> list[tuple[str, str, InstanceRole | None]]:
        """Model, name and role of instances that began by an operator's order since the last call."""
        started, self._started = self._started, []
        return started

    def ladder_view(self, model: str) -> LadderView:
        """The ladder's view of a model's starts and stops."""
        fleet = self._fleets.get(model)
        if fleet is None:
            return LadderView(scales=self.on)
        held = len(fleet.starting) + fleet.serving
        return LadderView(
            scaling=bool(fleet.asked or fleet.starting or fleet.stopping),
            scales=self.on and held < getattr(self._parameters, "instances_max", 0),
            scaled_ns=fleet.scaled_ns,
        )

    # orders

    def _new_order(
        self, model: str, action: str, instance: str = "", incarnation: int = 0, *, drain_limit_s: float = 0.0
    ) -> Order:
        self._orders += 1
        return Order(
            name=f"{self._name}/{self._incarnation}/{self._orders}",
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
            subject=self._subjects.provision(self._config.hosts[order.host_index], order.action),
            body=body,
            correlation=f"{PREFIX}{order.name}",
            timeout_ns=_ns(self._config.ask_limit_s),
        )

    def on_answer(self, replied: Replied, now_ns: int) -> list[Effect]:
        """Handle a provisioner's answer; ignore one about a model that is no longer led."""
        fleet, order = self._asked(replied.correlation)
        if fleet is None or order is None:
            return []
        match replied.body:
            case InstanceStarting() as body:
                order.instance = body.instance
                order.deadline_ns = now_ns + _ns(self._config.start_limit_s)
                fleet.starting[body.instance] = order
                if order.waiter:
                    self._started.append((order.model, body.instance, order.role))
                return self._scaling.accepted(order)
            case InstanceStopping() as body:
                order.deadline_ns = now_ns + _ns(order.drain_limit_s) + STOP_GRACE_NS
                fleet.stopping[body.instance] = order
                return self._scaling.accepted(order)
            case ProvisionRefused() as body:
                return self._refused(fleet, order, body)
            case body:
                return self._next_host(fleet, order, "malformed", f"{type(body).__name__} is no answer")

    def on_failure(self, body: RequestFailed) -> list[Effect]:
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

    def _refused(self, fleet: Fleet, order: Order, body: ProvisionRefused) -> list[Effect]:
        shared = body.reason is ProvisionRefusal.SHARED_PROCESS
        last = order.host_index + 1 >= len(self._config.hosts)
        if order.action == "stop" and (shared or (last and body.reason is ProvisionRefusal.UNKNOWN_INSTANCE)):
            fleet.unstoppable[order.instance] = order.incarnation
            return self._failed(fleet, order, str(body.reason), body.detail)
        return self._next_host(fleet, order, str(body.reason), body.detail)

    def _next_host(self, fleet: Fleet, order: Order, outcome: str, detail: str) -> list[Effect]:
        order.host_index += 1
        order.repeated = False
        if order.host_index < len(self._config.hosts):
            return [self._ask(fleet, order)]
        order.host_index -= 1
        return self._failed(fleet, order, outcome, detail)

    def _failed(self, fleet: Fleet, order: Order, outcome: str, detail: str) -> list[Effect]:
        """The end of an order that nobody carries out; said once per reason until a start succeeds again."""
        self.figures.orders[order.action, outcome] += 1
        if order.waiter:
            return self._scaling.failed(order, outcome, detail)
        fleet.failures += order.action == "start"
        key = f"{order.action} {outcome}"
        if key in self._said:
            return []
        self._said.add(key)
        fields = {"model": order.model, "action": order.action, "instance": order.instance, "why": outcome}
        return [Log(level="warning", event="provisioning_failed", fields=fields | {"detail": detail})]

    def _asked(self, correlation: str) -> tuple[Fleet | None, Order | None]:
        name = correlation.removeprefix(PREFIX)
        for fleet in self._fleets.values():
            if name in fleet.asked:
                return fleet, fleet.asked.pop(name)
        return None, None

    def _end(self, order: Order, outcome: str, *, level: str) -> Log:
        self.figures.orders[order.action, outcome] += 1
        fields = {"model": order.model, "action": order.action, "instance": order.instance, "outcome": outcome}
        return Log(level=level, event="provisioning_order_ended", fields=fields)

    # for people and checkers

    def _show(self, model: str, view: ProvisioningView, decision: ProvisioningDecision) -> None:
        states = {
            "serving": len(view.serving),
            "absent": view.absent,
            "starting": view.starting,
            "stopping": view.stopping,
        }
        signal_s = None if decision.signal_ns is None else decision.signal_ns / 1e9
        self.figures.models[model] = ModelFigures(states, signal_s, decision.utilisation)

    def snapshot(self) -> dict[str, Any]:
        """Open orders, by model."""
        return {model: fleet.snapshot() for model, fleet in sorted(self._fleets.items())}

    def check(self) -> None:
        """Bounds hold."""
        self._scaling.check()
        most = max(ORDER_MAX, getattr(self._parameters, "instances_max", 0))
        for fleet in self._fleets.values():
            assert len(fleet.starting) <= most, fleet.starting
            assert len(fleet.predicted) <= SAMPLES_MAX
            assert len(fleet.measured) <= SAMPLES_MAX


def _ns(seconds: float) -> int:
    return round(seconds * 1_000_000_000)
