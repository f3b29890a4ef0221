"""Moves of instances between the models of a cascade: carries out the ``move`` of its plan. No I/O.

One instance at a time leaves: one of a tier that has too many is drained and ends. On the devices that are free then
start all instances of tiers that have too few, together, and serve before the next one leaves. What comes next follows
from the plan in the store and from the instances that serve, so that whoever takes the cascade's lease over goes on
where its predecessor was.

| plan and instances | effect |
|---|---|
| tiers lack instances, and devices should be free | Request(StartInstance) for each that has devices |
| a tier has one too many, another instance serves, no order is open | Request(StopInstance) |
| InstanceStarting, InstanceStopping | the order is open until it serves, or serves no more |
| ProvisionRefused, no answer | the next host is asked; after the last one all begins again a second later |
| each tier has its instances | the plan without the move, with the thresholds that it brought |
| time is up, or a minute of refusals | the plan with the move back, or without one where this is the move back |

Devices are counted by the provisioner: what it refuses for want of one is asked again. The last instance of a
tier that serves is never stopped, so that a move needs at least two. The judge's model is moved as a tier is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
from millrace.actor.effects import Effect, Log, Request
from millrace.contracts.cascade import CascadeMove, CascadePlan
from millrace.contracts.local import Replied, RequestFailed
from millrace.contracts.provisioner import (
    InstanceStarting,
    InstanceStopping,
    ProvisionRefused,
    StartInstance,
    StopInstance,
)
from millrace.contracts.subjects import Subjects

from services.coordinator.cascade_config import CoordinatedTier
from services.coordinator.cascade_state import CascadeState, MoveOrder, Serving

#: Marks answers that are this part's among all that the coordinator gets.
PREFIX = "cascade_move/"

#: Time for a provisioner to answer.
ASK_NS = 2_000_000_000

#: Between a refusal and the next try, and tries in a row before the move is given up. A device is free some seconds
#: after its instance has left.
PAUSE_NS = 1_000_000_000
REFUSALS_MAX = 60


class CascadeMoves:
    """Orders of all cascades that are led here. Of a cascade either one stop is open, or starts are."""

    def __init__(self, subjects: Subjects, *, name: str, incarnation: int) -> None:
        self._subjects = subjects
        self._prefix = f"{name}/{incarnation}"
        self._orders = 0

    def step(self, state: CascadeState, serving: Serving, now_ns: int) -> tuple[CascadePlan | None, list[Effect]]:
        """Next plan (None where it stays as it is) and orders. For a plan with a move, under the cascade's lease."""
        plan = state.plan
        assert plan is not None
        assert plan.move is not None
        if not state.config.moves:
            return _without(plan, "instances stay: the cluster has no pool of devices"), []
        counts = [len(serving.get(tier.model, ())) for tier in plan.members]
        done = [order for order in state.orders if _is_done(order, serving)]
        if done:
            state.orders, state.refusals = [each for each in state.orders if each not in done], 0
        if counts == plan.move.instances and not state.orders:
            return completed(plan), [_log(plan, "cascade_moved", "info")]
        if now_ns >= plan.move.until_ns or state.refusals >= REFUSALS_MAX:
            return self._give_up(state, plan, now_ns)
        if now_ns < state.order_pause_ns:
            return None, []
        orders = self._next(state, plan.move, counts, serving)
        state.orders += orders
        return None, [self._ask(state, order) for order in orders]

    def on_answer(self, state: CascadeState, replied: Replied, now_ns: int) -> list[Effect]:
        """Handles a provisioner's answer to the open order."""
        order = _open(state, replied.correlation)
        if order is None:
            return []
        match replied.body:
            case InstanceStarting() as body:
                order.accepted, order.instance = True, body.instance
            case InstanceStopping():
                order.accepted = True
            case ProvisionRefused() as body:
                return self._next_host(state, order, f"{body.reason}: {body.detail}", now_ns)
            case body:
                return self._next_host(state, order, f"{type(body).__name__} is no answer", now_ns)
        return []

    def on_failure(self, state: CascadeState, body: RequestFailed, now_ns: int) -> list[Effect]:
        """Handles the lack of an answer. What was carried out after all shows in the instances."""
        order = _open(state, body.correlation)
        if order is None:
            return []
        return self._next_host(state, order, str(body.reason), now_ns)

    def _next_host(self, state: CascadeState, order: MoveOrder, why: str, now_ns: int) -> list[Effect]:
        order.host_index += 1
        if order.host_index < len(state.config.hosts):
            return [self._ask(state, order)]
        state.orders.remove(order)
        if now_ns < state.order_pause_ns:  # of a start beside one that was refused
            return []
        state.order_pause_ns = now_ns + PAUSE_NS
        state.refusals += 1
        if state.refusals > 1:
            return []
        fields = {"cascade": state.config.name, "action": order.action, "model": order.model, "why": why}
        return [Log(level="info", event="cascade_move_waits", fields=fields)]

    def _next(self, state: CascadeState, move: CascadeMove, counts: Sequence[int], serving: Serving) -> list[MoveOrder]:
        """Starts for which there are devices, beside those that are open; else a stop where nothing is open."""
        tiers = state.config.members
        if any(order.action == "stop" for order in state.orders):
            return []
        begun = Counter(order.model for order in state.orders)
        held = [now + begun[tier.model] for tier, now in zip(tiers, counts, strict=True)]
        lacking = [tier for tier, now, end in zip(tiers, held, move.instances, strict=True) for _ in range(end - now)]
        spare = [tier for tier, now, end in zip(tiers, counts, move.instances, strict=True) if now > end]
        devices = max(_devices(tiers, move.instances), _devices(tiers, move.before or move.instances))
        orders = self._starts(lacking, devices - _devices(tiers, held))
        if orders or state.orders:
            return orders
        answering = state.config.tiers
        if sum(counts[: len(answering)]) < 2:  # the last one that answers stays; a judge may go
            spare = [tier for tier in spare if tier not in answering]
        if lacking and not spare:
            return [self._order("start", lacking[0])]  # the provisioner knows what is free
        if spare:
            last = max(record.instance for record in serving[spare[0].model])
            return [self._order("stop", spare[0], last)]
        return []

    def _starts(self, lacking: Sequence[CoordinatedTier], free: int) -> list[MoveOrder]:
        orders = []
        for tier in lacking:
            if tier.tensor_parallel > free:
                break
            free -= tier.tensor_parallel
            orders.append(self._order("start", tier))
        return orders

    def _order(self, action: str, tier: CoordinatedTier, instance: str = "") -> MoveOrder:
        self._orders += 1
        return MoveOrder(name=f"{self._prefix}/{self._orders}", action=action, model=tier.model, instance=instance)

    def _ask(self, state: CascadeState, order: MoveOrder, *, drain_limit_s: float | None = None) -> Effect:
        body: StartInstance | StopInstance = StartInstance(order=order.name, model=order.model)
        if order.action == "stop":
            limit_s = state.config.drain_s if drain_limit_s is None else drain_limit_s
            body = StopInstance(instance=order.instance, drain_limit_ms=round(limit_s * 1000))
        return Request(
            subject=self._subjects.provision(state.config.hosts[order.host_index], order.action),
            body=body,
            correlation=PREFIX + order.name,
            timeout_ns=ASK_NS,
        )

    def _give_up(self, state: CascadeState, plan: CascadePlan, now_ns: int) -> tuple[CascadePlan, list[Effect]]:
        """Goes back, once; ends instances that were started and do not serve, as they hold devices."""
        orders, state.orders, state.refusals = state.orders, [], 0
        effects: list[Effect] = [_log(plan, "cascade_move_given_up", "warning")]
        for order in orders:
            if order.action == "start" and order.accepted:
                stop = MoveOrder(
                    name=f"{order.name}/end", action="stop", model=order.model, instance=order.instance,
                    host_index=order.host_index,
                )  # fmt: skip
                effects.append(self._ask(state, stop, drain_limit_s=0))
        move = plan.move
        assert move is not None
        if not move.before:
            return _without(plan, "the move back was given up"), effects
        until_ns = now_ns + round(state.config.move_limit_s * 1e9)
        back = CascadeMove(instances=move.before, until_ns=until_ns)
        told = {"epoch": plan.epoch + 1, "move": back, "reason": "a move was given up; instances go back"}
        return msgspec.structs.replace(plan, **told), effects


def completed(plan: CascadePlan) -> CascadePlan:
    """The plan after its move."""
    move = plan.move
    assert move is not None
    names = ", ".join(f"{count} of {tier.model}" for count, tier in zip(move.instances, plan.members, strict=True))
    done = _without(plan, f"instances moved: {names}")
    if not move.thresholds:
        return done
    shares = move.shares or [0.0] * len(plan.tiers)
    tiers = [
        msgspec.structs.replace(tier, threshold=threshold, share=share)
        for tier, threshold, share in zip(plan.tiers, move.thresholds, shares, strict=True)
    ]
    expected = {name: getattr(move, name) for name in ("quality", "quality_low", "p95_ns", "meets")}
    return msgspec.structs.replace(done, tiers=tiers, **expected)


def _without(plan: CascadePlan, reason: str) -> CascadePlan:
    return msgspec.structs.replace(plan, epoch=plan.epoch + 1, move=None, reason=reason)


def _open(state: CascadeState, correlation: str) -> MoveOrder | None:
    return next((order for order in state.orders if correlation == PREFIX + order.name), None)


def _is_done(order: MoveOrder, serving: Serving) -> bool:
    names = {record.instance for record in serving.get(order.model, ())}
    return order.accepted and (order.instance in names) == (order.action == "start")


def _devices(tiers: Sequence[CoordinatedTier], counts: Sequence[int]) -> int:
    return sum(tier.tensor_parallel * count for tier, count in zip(tiers, counts, strict=True))


def _log(plan: CascadePlan, event: str, level: str) -> Log:
    assert plan.move is not None
    fields = {"cascade": plan.cascade, "instances": plan.move.instances, "models": [t.model for t in plan.members]}
    return Log(level=level, event=event, fields=fields)
