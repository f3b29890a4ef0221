"""How sequences and calls end. Every call that was let in leaves through ``_close``, exactly once."""

from __future__ import annotations

from millrace.actor.effects import Effect, Log, Publish, StartTimer
from millrace.contracts.observers import RequestFinished
from millrace.contracts.worker import AcknowledgeSequences, CancelSequence

from services.ingress import tracing
from services.ingress.calls.limits import Refusal
from services.ingress.calls.messages import Call, CompleteCall, FailCall, RefusalKind, RefuseCall, Usage
from services.ingress.dispatch.prefix_blocks import blocks_decoded
from services.ingress.migration.epoch_grants import void
from services.ingress.state import IngressState, OpenCall, OpenSequence, SequencePhase
from services.ingress.times import MILLISECOND_NS

#: Timer that sends what is to be acknowledged, per instance in one message.
ACKNOWLEDGE_TIMER = "acknowledge"
#: How long acknowledgements are collected. Workers keep ended sequences for far longer.
ACKNOWLEDGE_AFTER_NS = 50 * MILLISECOND_NS


def usage_of(call: OpenCall) -> Usage:
    """Counts so far: each prompt once, outputs of all choices with their stop tokens."""
    return Usage(call.prompt_tokens, call.output_tokens, call.cached_tokens)


def cancel(state: IngressState, sequence: OpenSequence, reason: str, out: list[Effect]) -> None:
    """Takes a sequence from the instance that has, or may have, it."""
    if sequence.instance is not None:
        cancel_at(state, sequence, sequence.instance.name, reason, out)


def cancel_at(state: IngressState, sequence: OpenSequence, instance: str, reason: str, out: list[Effect]) -> None:
    """Takes a sequence from an instance, up to its present epoch."""
    out.append(
        Publish(
            subject=state.subjects.engine(instance, "cancel"),
            body=CancelSequence(sequence=sequence.id, epoch=sequence.epoch, reason=reason),
            request=sequence.call.request,
        )
    )


def detach(state: IngressState, sequence: OpenSequence) -> None:
    """Nobody decodes it any more: not in its instance's books, nothing of it asked."""
    instance = sequence.instance
    if instance is not None:
        instance.remove(sequence.id)
        owned = state.owned.get(instance.name)
        if owned is not None:
            owned.pop(sequence.id, None)
            if not owned:
                del state.owned[instance.name]
        sequence.instance = None
    state.waiting.pop(sequence.id, None)
    state.pending.pop(sequence.resend, None)
    state.pending.pop(sequence.submit, None)
    state.pending.pop(sequence.asking, None)
    sequence.resend = sequence.submit = sequence.asking = ""


def end_sequence(
    state: IngressState, sequence: OpenSequence, *, decoding: bool, reason: str, out: list[Effect]
) -> None:
    """A sequence has its finish reason: its engine is told to stop (``decoding``) or to forget it."""
    void(state, sequence, "ended", out)
    if decoding:
        cancel(state, sequence, reason, out)
    elif sequence.instance is not None:
        acknowledge(state, sequence.instance.name, sequence.id, sequence.epoch, out)
    detach(state, sequence)
    sequence.phase = SequencePhase.ENDED
    del state.sequences[sequence.id]
    sequence.call.unended -= 1


def acknowledge(state: IngressState, instance: str, sequence: str, epoch: int, out: list[Effect]) -> None:
    """Has the next acknowledgement to that instance name this sequence."""
    if not state.acknowledge:
        out.append(StartTimer(name=ACKNOWLEDGE_TIMER, at_ns=state.now_ns + ACKNOWLEDGE_AFTER_NS))
    state.acknowledge.setdefault(instance, []).append((sequence, epoch))


def send_acknowledgements(state: IngressState, out: list[Effect]) -> None:
    """Sends what was collected."""
    for instance, sequences in state.acknowledge.items():
        out.append(
            Publish(
                subject=state.subjects.engine(instance, "acknowledge"), body=AcknowledgeSequences(sequences=sequences)
            )
        )
    state.acknowledge = {}


def complete(state: IngressState, call: OpenCall, out: list[Effect]) -> None:
    """Every choice ended."""
    usage = usage_of(call)
    state.metrics.e2e.observe(state.now_ns - call.arrival_ns)
    _note_errors(state, call)
    out.append(CompleteCall(request=call.request, usage=usage))
    _close(state, call, "completed", "", out)


def _note_errors(state: IngressState, call: OpenCall) -> None:
    """Joins what was predicted with what happened, where that is one thing: all of it on one instance."""
    forecast = call.forecast
    if forecast is None or call.continuations or call.migrations:
        return
    state.metrics.note_error("e2e", forecast.e2e_ns, state.now_ns - call.placed_ns)
    if call.first_token_ns:
        state.metrics.note_error("ttft", forecast.ttft_ns, call.first_token_ns - call.placed_ns)


def abandon(state: IngressState, call: OpenCall, reason: str, out: list[Effect]) -> None:
    """The client is gone: nothing more is delivered."""
    _end_all(state, call, reason, out)
    _close(state, call, "cut" if reason == "slow_reader" else "cancelled", reason, out)


def refuse(state: IngressState, call: Call, refusal: Refusal, out: list[Effect]) -> None:
    """The call is not let in: nothing is kept of it."""
    state.metrics.refusals.add(refusal.kind.value)
    out.append(
        RefuseCall(
            request=call.request,
            kind=refusal.kind,
            detail=refusal.detail,
            param=refusal.param,
            retry_after_s=refusal.retry_after_s,
        )
    )


def refuse_or_fail(state: IngressState, call: OpenCall, kind: RefusalKind, detail: str, out: list[Effect]) -> None:
    """The call cannot be done: refused if it was not accepted, else failed."""
    _end_all(state, call, kind.value, out)
    state.metrics.refusals.add(kind.value)
    if call.accepted:
        out.append(FailCall(request=call.request, kind=kind, detail=detail))
    else:
        retry_after_s = 1.0 if kind in (RefusalKind.QUEUE_FULL, RefusalKind.NO_INSTANCE) else 0.0
        out.append(RefuseCall(request=call.request, kind=kind, detail=detail, retry_after_s=retry_after_s))
    fields = {"kind": kind.value, "detail": detail}
    out.append(Log(level="warning", event="call_failed", fields=fields, request=call.request))
    _close(state, call, "failed" if call.accepted else "refused", detail, out)


def _end_all(state: IngressState, call: OpenCall, reason: str, out: list[Effect]) -> None:
    for sequence in call.sequences:
        if sequence.phase is not SequencePhase.ENDED:
            end_sequence(state, sequence, decoding=True, reason=reason, out=out)
    state.pending.pop(call.tagging, None)


def _close(state: IngressState, call: OpenCall, outcome: str, detail: str, out: list[Effect]) -> None:
    """Books, outcome and root span of a call that ended."""
    del state.calls[call.request]
    metrics = state.metrics
    choices = len(call.call.prompts) * call.call.n
    state.admission.release(call.call, choices, call.output_tokens, state.now_ns)
    metrics.calls_open = state.admission.calls_open
    metrics.sequences_open = state.admission.sequences_open
    metrics.calls.add(call.call.model, outcome)
    metrics.cached_tokens += call.cached_tokens
    if call.accepted:
        out.append(_outcome(state, call, outcome, detail))
    tracing.end_call(call, outcome, usage_of(call), "" if outcome == "completed" else detail, state.now_ns, out)


def _outcome(state: IngressState, call: OpenCall, outcome: str, detail: str) -> Publish:
    return Publish(
        subject=state.subjects.outcome(call.call.model),
        body=RequestFinished(
            request=call.request,
            model=call.call.model,
            outcome=outcome,
            ingress=state.name,
            key=call.call.key,
            detail=detail,
            prompt_tokens=call.prompt_tokens,
            cached_tokens=call.cached_tokens,
            output_tokens=[len(s.log) for s in call.sequences],
            finish_reasons=[s.finish_reason for s in call.sequences],
            continuations=call.continuations,
            predicted_output_tokens=call.predicted,
            arrival_ns=call.arrival_ns,
            ttft_ns=call.first_token_ns - call.arrival_ns if call.first_token_ns else None,
            e2e_ns=state.now_ns - call.arrival_ns,
            instances=call.instances,
            predicted_ttft_ns=None if call.forecast is None else call.forecast.ttft_ns,
            predicted_e2e_ns=None if call.forecast is None else call.forecast.e2e_ns,
            placed_ns=call.placed_ns,
            migrations=call.migrations,
            predicted_cached_tokens=None if call.forecast is None else call.forecast.cached_tokens,
            block_hashes=blocks_decoded(call.sequences[0]),
        ),
        request=call.request,
        traceparent=call.call.traceparent,
    )
