"""Delivery and end of a cascade's call. Every admitted one leaves through ``_close``, exactly once."""

from __future__ import annotations

from typing import Any

import msgspec
from millrace.actor.effects import Log, RecordSpan
from millrace.contracts.observers import RequestFinished

from services.ingress import tracing
from services.ingress.calls.completion import publish_outcome
from services.ingress.calls.listener import failure
from services.ingress.calls.messages import AcceptCall, CompleteCall, DeliverDeltas, Usage
from services.ingress.cascade.open_cascade import Attempt, OpenCascade
from services.ingress.state import IngressState

_encode = msgspec.json.Encoder().encode


def accept(state: IngressState, parent: OpenCascade, answering: Attempt) -> None:
    """Tell the client who answers."""
    parent.first_ns = state.now_ns
    state.metrics.ttft.observe(state.now_ns - parent.arrival_ns)
    state.emit(AcceptCall(request=parent.request, answering=answering.told()))


def deliver_deltas(state: IngressState, parent: OpenCascade) -> None:
    """Send what the attempt that streams has generated."""
    attempt = parent.attempt
    if attempt.deltas:
        deltas, attempt.deltas = attempt.deltas, []
        state.emit(DeliverDeltas(request=parent.request, deltas=deltas, usage=attempt.usage()))


def complete(state: IngressState, parent: OpenCascade, delivered: Attempt) -> None:
    """Deliver the rest of an answer, and end the call."""
    delivered.outcome = "delivered"
    state.metrics.e2e.observe(state.now_ns - parent.arrival_ns)
    state.metrics.deliveries.add(parent.call.model, delivered.reason.value)
    report, usage = parent.report(delivered), delivered.usage()
    deltas, delivered.deltas = delivered.deltas, []
    state.emit(DeliverDeltas(request=parent.request, deltas=deltas, usage=usage, report=report))
    state.emit(CompleteCall(request=parent.request, usage=usage, report=report))
    _close(state, parent, "completed", "", delivered=delivered)


def refuse(state: IngressState, parent: OpenCascade) -> None:
    """End a call that no attempt can answer any more."""
    refusal = parent.refusal
    assert refusal is not None
    begun = parent.first_ns > 0
    state.emit(failure(parent.request, refusal, accepted=begun))
    fields = {"kind": refusal.kind.value, "detail": refusal.detail, "attempts": len(parent.attempts)}
    state.emit(Log(level="warning", event="call_failed", fields=fields, request=parent.request))
    _close(state, parent, "failed" if parent.accepted else "refused", refusal.detail)


def abandon(state: IngressState, parent: OpenCascade, reason: str) -> None:
    """End a call whose client left."""
    _close(state, parent, "cut" if reason == "slow_reader" else "cancelled", reason)


def _close(
    state: IngressState,
    parent: OpenCascade,
    outcome: str,
    detail: str,
    *,
    delivered: Attempt | None = None,
) -> None:
    """Release what the call was counted with; publish its outcome and record its spans."""
    del state.parents[parent.request]
    state.pending.pop(parent.asking, None)
    parent.asking = ""
    state.admission.release(parent.call, parent.choices, _charged(parent), state.now_ns)
    state.metrics.calls.add(parent.call.model, outcome)
    for attempt in parent.attempts:
        if attempt.outcome == "complete":
            attempt.outcome = "rejected" if delivered is not None else "cancelled"
        state.metrics.attempts.add(parent.call.model, attempt.model, attempt.outcome)
    if parent.attempts:
        record_attempt(state, parent, parent.attempt)
    finished = _finished(state, parent, outcome, detail, delivered)
    if parent.accepted:
        publish_outcome(state, parent.call, finished)
    if parent.trace is not None:
        tracing.end_root(state, parent.call, parent.trace, finished, _course(parent, delivered))


def _charged(parent: OpenCascade) -> int:
    """Tokens of all attempts, but for the prompts that admission has charged."""
    usages = [attempt.usage() for attempt in parent.attempts]
    return sum(usage.completion_tokens for usage in usages) + sum(usage.prompt_tokens for usage in usages[1:])


def _finished(
    state: IngressState, parent: OpenCascade, outcome: str, detail: str, delivered: Attempt | None
) -> RequestFinished:
    sequences = delivered.call.sequences if delivered is not None and delivered.call is not None else []
    usage = delivered.usage() if delivered is not None else Usage(0, 0)
    calls = [attempt.call for attempt in parent.attempts if attempt.call is not None]
    return RequestFinished(
        request=parent.request,
        model=parent.call.model,
        outcome=outcome,
        ingress=state.name,
        key=parent.call.key,
        detail=detail,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        output_tokens=[len(s.log) for s in sequences],
        finish_reasons=[s.output.finish_reason for s in sequences],
        continuations=sum(c.continuations for c in calls),
        migrations=sum(c.migrations for c in calls),
        arrival_ns=parent.arrival_ns,
        ttft_ns=parent.first_ns - parent.arrival_ns if parent.first_ns else None,
        e2e_ns=state.now_ns - parent.arrival_ns,
        attempts=[attempt.told() for attempt in parent.attempts],
        reason=delivered.reason.value if delivered is not None else "",
    )


# Spans: ``ingress`` at the root, an ``attempt`` for each child call below it.


def record_attempt(state: IngressState, parent: OpenCascade, attempt: Attempt) -> None:
    """Record the span of an attempt that is settled; the spans of its dispatch and decoding are its children."""
    if parent.trace is None:
        return
    told = attempt.told()
    attributes: dict[str, Any] = {
        name: value
        for name, value in msgspec.structs.asdict(told).items()
        if value is not None and name not in ("started_ns", "ended_ns")
    }
    state.emit(
        RecordSpan(
            name="attempt",
            traceparent=attempt.span,
            parent_span_id=parent.trace.span_id,
            start_ns=attempt.started_ns,
            end_ns=attempt.ended_ns or attempt.started_ns,
            attributes=attributes,
            error=attempt.detail if attempt.outcome == "failed" else "",
        )
    )


def _course(parent: OpenCascade, delivered: Attempt | None) -> dict[str, Any]:
    """Attributes of the root span: what the cascade did."""
    instances = [name for attempt in parent.attempts if attempt.call is not None for name in attempt.call.instances]
    return {
        "entry": parent.entry,
        "epoch": parent.served.plan.epoch,
        "attempts": _encode([attempt.told() for attempt in parent.attempts]).decode(),  # `millrace explain` reads it
        "instances": ", ".join(dict.fromkeys(instances)),
        "delivered": delivered.model if delivered is not None else "",
        "reason": delivered.reason.value if delivered is not None else "",
    }
