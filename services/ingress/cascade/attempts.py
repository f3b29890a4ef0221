"""Attempts: child calls of a cascade, and what they tell their parent."""

from __future__ import annotations

import msgspec
from millrace.telemetry.tracecontext import child, format_traceparent

from services.ingress.calls.admission import open_call, too_long
from services.ingress.calls.limits import Refusal
from services.ingress.calls.listener import Listener
from services.ingress.calls.messages import Call, ChoiceDelta
from services.ingress.calls.open_call import OpenCall
from services.ingress.cascade.escalation import next_tier, out_of_reach, rejection_bound, resumable
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


class AttemptListener(Listener):
    """Parent's ear at an attempt. Events wait until the message that caused them is handled."""

    is_client = False

    def __init__(self, state: IngressState, parent: OpenCascade, attempt: Attempt) -> None:
        super().__init__(state.emit)
        self._state = state
        self._parent = parent
        self._attempt = attempt
        self._commits = parent.call.cascade.early_commit

    def on_accepted(self, call: OpenCall) -> None:
        self._parent.accepted = True

    def on_tokens(self, call: OpenCall) -> None:
        if self._commits or (self._attempt.bound is not None and out_of_reach(self._state, self._attempt)):
            self._progressed()

    def on_deltas(self, call: OpenCall, deltas: list[ChoiceDelta]) -> None:
        self._attempt.deltas += deltas
        if self._commits or self._attempt.streams:
            self._progressed()

    def _progressed(self) -> None:
        self._parent.progressed = True
        self._state.unsettled[self._parent.request] = self._parent

    def on_completed(self, call: OpenCall) -> None:
        self._tell(AnswerCompleted())

    def on_failed(self, call: OpenCall, refusal: Refusal) -> None:
        self._tell(AttemptFailed(refusal))

    def _tell(self, event: CascadeEvent) -> None:
        self._parent.events.append((self._attempt, event))
        self._state.unsettled[self._parent.request] = self._parent


def start_attempt(state: IngressState, parent: OpenCascade, tier: int) -> None:
    """Open the child call of a tier and dispatch it."""
    _start(state, parent, parent.served.plan.tiers[tier].model, tier)


def start_again(state: IngressState, parent: OpenCascade) -> None:
    """Run an attempt that was rejected early once more, to its end: no later tier can answer."""
    rejected = resumable(state, parent)
    assert rejected is not None
    _start(state, parent, rejected.model, rejected.tier, again=True)


def _start(state: IngressState, parent: OpenCascade, model: str, tier: int, *, again: bool = False) -> None:
    member = parent.members.get(model)
    assert member is not None, f"{model} cannot take {parent.request}"
    request = f"{parent.request}~{len(parent.attempts) + 1}"
    attempt = Attempt(
        request=request,
        tier=tier,
        model=model,
        epoch=parent.served.plan.epoch,
        started_ns=state.now_ns,
        again=again,
    )
    parent.attempts.append(attempt)
    further, why = next_tier(state, parent)
    attempt.streams = parent.call.stream and further is None
    attempt.reason = DeliveryReason.TIER_UNAVAILABLE if again else why
    attempt.bound = rejection_bound(state, parent) if further is not None else None
    listener = AttemptListener(state, parent, attempt)
    call = _child(state, parent, member)
    refusal = too_long(state, call)
    if refusal is not None:
        listener.on_failed(OpenCall(call, state.now_ns, 0, listener), refusal)
        return
    attempt.call = open_call(state, call, listener)
    if further is not None or parent.best() is not None or resumable(state, parent) is not None:
        attempt.call.patience_ns = int(parent.served.config.tier_wait_s * SECOND_NS)
    dispatch_new(state, attempt.call)


def _child(state: IngressState, parent: OpenCascade, member: Call) -> Call:
    """The call of a member model; its trace is a child of the parent's."""
    call, attempt = parent.call, parent.attempt
    attempt.span = call.traceparent
    if parent.trace is not None:
        attempt.span = format_traceparent(child(parent.trace, state.rng))
    return msgspec.structs.replace(
        member,
        request=attempt.request,
        parent=call.request,
        stream=call.stream and (attempt.streams or call.cascade.early_commit),
        timeout_ns=max(1, parent.deadline_ns - state.now_ns),
        traceparent=attempt.span,
        parent_span_id="" if parent.trace is None else parent.trace.span_id,
        judged=True,
    )


def look_again(state: IngressState, parent: OpenCascade) -> None:
    """Another plan is in force: where the open attempt becomes hopeless may have changed."""
    attempt = parent.attempt
    if parent.phase is CascadePhase.ATTEMPTING and attempt.request in state.calls and not attempt.streams:
        attempt.epoch, attempt.bound = parent.served.plan.epoch, rejection_bound(state, parent)
        parent.progressed = True
        state.unsettled[parent.request] = parent
