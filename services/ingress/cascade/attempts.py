"""Attempts: child calls of a cascade, which tier comes next, and what they tell their parent."""

from __future__ import annotations

import msgspec
from millrace.actor.effects import Effect
from millrace.telemetry.tracecontext import child, format_traceparent

from services.ingress.calls.admission import open_call, too_long
from services.ingress.calls.limits import Refusal
from services.ingress.calls.messages import Call, CascadeOptions, ChoiceDelta, MemberCall, RefusalKind
from services.ingress.calls.open_call import OpenCall
from services.ingress.cascade.answer_scoring import out_of_reach
from services.ingress.cascade.lifecycle import (
    AnswerCompleted,
    AttemptFailed,
    CascadeEvent,
    CascadePhase,
    DeliveryReason,
)
from services.ingress.cascade.open_cascade import Attempt, OpenCascade
from services.ingress.dispatch.dispatcher import dispatch_new
from services.ingress.state import IngressState
from services.ingress.times import SECOND_NS

#: Failures that another model would repeat, or that leave no time for one.
_FINAL = frozenset({RefusalKind.INVALID, RefusalKind.AT_FAULT, RefusalKind.TIMEOUT, RefusalKind.STOPPING})


class AttemptListener:
    """Parent's ear at an attempt. Events wait until the message that caused them is handled."""

    is_client = False

    def __init__(self, state: IngressState, parent: OpenCascade, attempt: Attempt) -> None:
        self._state = state
        self._parent = parent
        self._attempt = attempt
        self._commits = parent.call.cascade.early_commit

    def on_accepted(self, call: OpenCall, out: list[Effect]) -> None:
        self._parent.accepted = True

    def on_tokens(self, call: OpenCall) -> None:
        if self._commits or (self._attempt.bound is not None and out_of_reach(self._state, self._attempt)):
            self._progressed()

    def on_deltas(self, call: OpenCall, deltas: list[ChoiceDelta], out: list[Effect]) -> None:
        self._attempt.deltas += deltas
        if self._commits or self._attempt.streams:
            self._progressed()

    def _progressed(self) -> None:
        self._parent.progressed = True
        self._state.unsettled[self._parent.request] = self._parent

    def on_completed(self, call: OpenCall, out: list[Effect]) -> None:
        self._tell(AnswerCompleted())

    def on_failed(self, call: OpenCall, refusal: Refusal, out: list[Effect]) -> None:
        self._tell(AttemptFailed(refusal))

    def _tell(self, event: CascadeEvent) -> None:
        self._parent.events.append((self._attempt, event))
        self._state.unsettled[self._parent.request] = self._parent


def start_attempt(state: IngressState, parent: OpenCascade, tier: int, out: list[Effect]) -> None:
    """Open the child call of a tier and dispatch it."""
    _start(state, parent, parent.served.plan.tiers[tier].model, tier, out)


def start_again(state: IngressState, parent: OpenCascade, out: list[Effect]) -> None:
    """Run an attempt that was rejected early once more, to its end: no later tier can answer."""
    rejected = resumable(state, parent)
    assert rejected is not None
    _start(state, parent, rejected.model, rejected.tier, out, again=True)


def _start(
    state: IngressState, parent: OpenCascade, model: str, tier: int, out: list[Effect], *, again: bool = False
) -> None:
    member = _member(parent, model)
    assert member is not None, f"{model} cannot take {parent.request}"
    request = f"{parent.request}~{len(parent.attempts) + 1}"
    attempt = Attempt(request, tier=tier, model=model, epoch=parent.served.plan.epoch, now_ns=state.now_ns)
    attempt.again = again
    parent.attempts.append(attempt)
    further, why = next_tier(state, parent)
    attempt.streams = parent.call.stream and further is None
    attempt.reason = DeliveryReason.TIER_UNAVAILABLE if again else why
    attempt.bound = rejection_bound(state, parent) if further is not None else None
    listener = AttemptListener(state, parent, attempt)
    call = _child(state, parent, member)
    refusal = too_long(state, call)
    if refusal is not None:
        listener.on_failed(OpenCall(call, state.now_ns, 0, listener), refusal, out)
        return
    attempt.call = open_call(state, call, listener)
    if further is not None or parent.best() is not None or resumable(state, parent) is not None:
        attempt.call.patience_ns = int(parent.served.config.tier_wait_s * SECOND_NS)
    dispatch_new(state, attempt.call, out)


def _child(state: IngressState, parent: OpenCascade, member: MemberCall) -> Call:
    """The call of a member model; its trace is a child of the parent's."""
    call, attempt = parent.call, parent.attempt
    attempt.span = call.traceparent
    if parent.trace is not None:
        attempt.span = format_traceparent(child(parent.trace, state.rng))
    return msgspec.structs.replace(
        call,
        request=attempt.request,
        parent=call.request,
        model=member.model,
        prompts=member.prompts,
        prompt_head=member.prompt_head,
        sampling=member.sampling,
        stream=call.stream and (attempt.streams or call.cascade.early_commit),
        timeout_ns=max(1, parent.deadline_ns - state.now_ns),
        traceparent=attempt.span,
        parent_span_id="" if parent.trace is None else parent.trace.span_id,
        judged=True,
        members=[],
        cascade=CascadeOptions(),
    )


def _member(parent: OpenCascade, model: str) -> MemberCall | None:
    return parent.members.get(model)


def planned_tiers(parent: OpenCascade) -> list[int]:
    """Positions of the tiers that the plan in force and the client allow, and whose model can take the request."""
    highest = parent.call.cascade.max_tier
    return [
        position
        for position, tier in enumerate(parent.served.plan.tiers)
        if (tier.replicas or tier.awaited)
        and _member(parent, tier.model) is not None
        and (highest is None or position <= highest)
    ]


def usable_tiers(state: IngressState, parent: OpenCascade) -> list[int]:
    """Those of them that have an instance now."""
    tiers = parent.served.plan.tiers
    return [position for position in planned_tiers(parent) if state.cluster.usable(tiers[position].model)]


def _after(parent: OpenCascade) -> int:
    """The highest position that was tried, by the plans of those times and by the one in force; -1 for none."""
    tried = [attempt.tier for attempt in parent.attempts]
    now = [parent.served.position(attempt.model) for attempt in parent.attempts]
    return max(tried + [position for position in now if position is not None], default=-1)


def is_last(parent: OpenCascade) -> bool:
    """Whether the plan has no further tier for this request."""
    after = _after(parent)
    return _ends_at(parent, after) or not any(position > after for position in planned_tiers(parent))


def _ends_at(parent: OpenCascade, position: int) -> bool:
    """Whether the entry policy asks no tier above this one. Where one has failed, it does."""
    return parent.last is not None and position >= parent.last and parent.attempt.outcome != "failed"


def next_tier(state: IngressState, parent: OpenCascade) -> tuple[int | None, DeliveryReason]:
    """Position of the next tier that can answer in time; None with the reason where there is none."""
    after, tiers = _after(parent), parent.served.plan.tiers
    if is_last(parent):
        return None, DeliveryReason.LAST_TIER
    further = [position for position in planned_tiers(parent) if position > after]
    position = next((i for i in further if state.cluster.usable(tiers[i].model)), None)
    if position is None:
        return None, DeliveryReason.TIER_UNAVAILABLE
    expected_ns = tiers[position].p95_ns
    if state.now_ns + expected_ns >= _latest_ns(parent):
        return None, DeliveryReason.DEADLINE
    return position, DeliveryReason.SCORE


def resumable(state: IngressState, parent: OpenCascade) -> Attempt | None:
    """The highest attempt that was rejected early, was not run again, and whose model has an instance."""
    again = {attempt.model for attempt in parent.attempts if attempt.again}
    rejected = [
        attempt
        for attempt in parent.attempts
        if attempt.outcome == "rejected_early" and attempt.model not in again and state.cluster.usable(attempt.model)
    ]
    return max(rejected, key=lambda attempt: attempt.tier, default=None)


def _latest_ns(parent: OpenCascade) -> int:
    own_ns = int(parent.served.config.deadline_s * SECOND_NS)
    return min(parent.deadline_ns, parent.arrival_ns + own_ns) if own_ns else parent.deadline_ns


def may_follow(refusal: Refusal) -> bool:
    """Whether another model may succeed after this failure."""
    return refusal.kind not in _FINAL


def planned_threshold(parent: OpenCascade) -> float:
    """Least score at which the current attempt's answer is delivered, without the escalation budget."""
    if parent.call.cascade.quality is not None:
        return parent.call.cascade.quality
    plan, attempt = parent.served.plan, parent.attempt
    position = parent.served.position(attempt.model)
    if position is None:  # the plan that named it was replaced
        position = min(attempt.tier, len(plan.tiers) - 1)
    return plan.tiers[position].threshold


def threshold_now(state: IngressState, parent: OpenCascade) -> float:
    """The same, as the escalation budget has it."""
    budget = parent.served.budget(parent.attempt.model)
    return budget.threshold(planned_threshold(parent), state.now_ns)


def look_again(state: IngressState, parent: OpenCascade) -> None:
    """Another plan is in force: where the open attempt becomes hopeless may have changed."""
    attempt = parent.attempt
    if parent.phase is CascadePhase.ATTEMPTING and attempt.request in state.calls and not attempt.streams:
        attempt.epoch, attempt.bound = parent.served.plan.epoch, rejection_bound(state, parent)
        parent.progressed = True
        state.unsettled[parent.request] = parent


def rejection_bound(state: IngressState, parent: OpenCascade) -> float | None:
    """Evidence below which the current attempt cannot reach its threshold; None where that cannot be known early."""
    config, judge = parent.served.config, state.judges.get(parent.attempt.model)
    if judge is None or not config.early_rejection or parent.served.plan.judge != "confidence" or parent.attempt.again:
        return None
    return judge.least_value(threshold_now(state, parent))
