"""Moves of instances between the models of a cascade: carries out the ``move`` of its plan. No I/O.

One instance at a time: one of a tier that has too many is drained and ends, then one of a tier that has too few starts
on its device. What comes next follows from the plan in the store and from the instances that serve, so that whoever
takes the cascade's lease over goes on where its predecessor was.

| plan and instances | effect |
|---|---|
| a tier lacks an instance, and a device should be free | Request(StartInstance) |
| a tier has one too many, and another instance serves | Request(StopInstance) |
| InstanceStarting, InstanceStopping | nothing else is ordered until it serves, or serves no more |
| ProvisionRefused, no answer | the next host is asked; after the last one all begins again a second later |
| each tier has its instances | the plan without the move, with the thresholds that it brought |
| time is up, or a minute of refusals | the plan with the move back, or without one where this is the move back |

Devices are counted by the provisioner: what it refuses for want of one is asked again. The last instance that serves is
never stopped, so that a move needs at least two.
"""

from __future__ import annotations

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
    """Orders of all cascades that are led here. At most one order of a cascade is open."""

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
        counts = [len(serving.get(tier.model, ())) for tier in plan.tiers]
        if state.order is not None and _is_done(state.order, serving):
            state.order, state.refusals = None, 0
        if counts == plan.move.instances and state.order is None:
            return completed(plan), [_log(plan, "cascade_moved", "info")]
        if now_ns >= plan.move.until_ns or state.refusals >= REFUSALS_MAX:
            return self._give_up(state, plan, now_ns)
        if state.order is not None or now_ns < state.order_pause_ns:
            return None, []
        order = self._next(state.config.tiers, plan.move, counts, serving)
        if order is None:
            return None, []
        state.order = order
        return None, [self._ask(state, order)]

    def on_answer(self, state: CascadeState, replied: Replied, now_ns: int) -> list[Effect]:
        """Handles a provisioner's answer to the open order."""
        order = state.order
        if order is None or replied.correlation != PREFIX + order.name:
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
        order = state.order
        if order is None or body.correlation != PREFIX + order.name:
            return []
        return self._next_host(state, order, str(body.reason), now_ns)

    def _next_host(self, state: CascadeState, order: MoveOrder, why: str, now_ns: int) -> list[Effect]:
        order.host_index += 1
        if order.host_index < len(state.config.hosts):
            return [self._ask(state, order)]
        state.order, state.order_pause_ns = None, now_ns + PAUSE_NS
        state.refusals += 1
        if state.refusals > 1:
            return []
        fields = {"cascade": state.config.name, "action": order.action, "model": order.model, "why": why}
        return [Log(level="info", event="cascade_move_waits", fields=fields)]

    def _next(
        self, tiers: Sequence[CoordinatedTier], move: CascadeMove, counts: Sequence[int], serving: Serving
    ) -> MoveOrder | None:
        lacking = [tier for tier, now, end in zip(tiers, counts, move.instances, strict=True) if now < end]
        spare = [tier for tier, now, end in zip(tiers, counts, move.instances, strict=True) if now > end]
        devices = max(_devices(tiers, move.instances), _devices(tiers, move.before or move.instances))
        free = devices - _devices(tiers, counts)
        if lacking and (lacking[0].tensor_parallel <= free or not spare or sum(counts) < 2):
            return self._order("start", lacking[0])
        if spare and sum(counts) > 1:
            last = max(record.instance for record in serving[spare[0].model])
            return self._order("stop", spare[0], last)
        return None

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
        """Goes back, once; ends an instance that was started and does not serve, as it holds a device."""
        order, state.order, state.refusals = state.order, None, 0
        effects: list[Effect] = [_log(plan, "cascade_move_given_up", "warning")]
        if order is not None and order.action == "start" and order.accepted:
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
    names = ", ".join(f"{count} of {tier.model}" for count, tier in zip(move.instances, plan.tiers, strict=True))
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


def _is_done(order: MoveOrder, serving: Serving) -> bool:
    names = {record.instance for record in serving.get(order.model, ())}
    return order.accepted and (order.instance in names) == (order.action == "start")


def _devices(tiers: Sequence[CoordinatedTier], counts: Sequence[int]) -> int:
    return sum(tier.tensor_parallel * count for tier, count in zip(tiers, counts, strict=True))


def _log(plan: CascadePlan, event: str, level: str) -> Log:
    assert plan.move is not None
    fields = {"cascade": plan.cascade, "instances": plan.move.instances, "models": [t.model for t in plan.tiers]}
    return Log(level=level, event=event, fields=fields)
