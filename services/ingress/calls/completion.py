"""Completion: the end of sequences and calls. Every admitted call leaves through ``_close``, exactly once."""

from __future__ import annotations

from millrace.actor.effects import Log, Publish, StartTimer
from millrace.contracts.observers import RequestFinished
from millrace.contracts.worker import AcknowledgeSequences

from services.ingress import tracing
from services.ingress.calls.limits import Refusal
from services.ingress.calls.listener import failure
from services.ingress.calls.messages import Call, RefusalKind
from services.ingress.calls.open_call import OpenCall
from services.ingress.lifecycle import Cancelled, Finished, SequencePhase
from services.ingress.migration.epoch_grants import revoke
from services.ingress.migration.replicas import free_replica
from services.ingress.sequence import OpenSequence
from services.ingress.state import IngressState
from services.ingress.times import MILLISECOND_NS, SECOND_NS

#: Timer that sends the collected acknowledgements, one message per instance.
ACKNOWLEDGE_TIMER = "acknowledge"
#: How long acknowledgements are collected. Workers keep ended sequences for far longer.
ACKNOWLEDGE_AFTER_NS = 50 * MILLISECOND_NS
#: Later than any deadline.
NO_DEADLINE_NS = 1 << 63


# Reactions to the end of a sequence.


def finish(state: IngressState, sequence: OpenSequence, event: Finished) -> None:
    """The log ends with a finish reason: the engine forgets the sequence, or is told to stop."""
    end_sequence(state, sequence, decoding=not event.engine_knows, reason="stopped")
    complete_if_ended(state, sequence.call)


def release(state: IngressState, sequence: OpenSequence, event: Cancelled) -> None:
    """The call ends: nothing more of the sequence is wanted."""
    end_sequence(state, sequence, decoding=True, reason=event.reason)


def end_sequence(state: IngressState, sequence: OpenSequence, *, decoding: bool, reason: str) -> None:
    """Take an ended sequence out of all tables. Its engine is told to stop (``decoding``) or to forget it."""
    revoke(state, sequence, "ended")
    free_replica(state, sequence)
    if decoding:
        cancel(state, sequence, reason)
    elif sequence.instance is not None:
        acknowledge(state, sequence.instance.name, sequence.id, sequence.epoch)
    detach(state, sequence)
    del state.sequences[sequence.id]
    sequence.call.unended -= 1


def cancel(state: IngressState, sequence: OpenSequence, reason: str) -> None:
    """Cancel a sequence at the instance that has, or may have, it."""
    if sequence.instance is not None:
        cancel_at(state, sequence, sequence.instance.name, reason)


def cancel_at(state: IngressState, sequence: OpenSequence, instance: str, reason: str) -> None:
    """Cancel a sequence at an instance, up to its present epoch."""
    state.cancel(sequence.id, sequence.epoch, instance, reason, sequence.call.request)


def detach(state: IngressState, sequence: OpenSequence) -> None:
    """Take a sequence from its instance, with all open questions about it."""
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
    state.pending.pop(sequence.resend.correlation, None)
    state.pending.pop(sequence.submit, None)
    state.pending.pop(sequence.asking, None)
    sequence.resend.correlation = sequence.submit = sequence.asking = ""


def acknowledge(state: IngressState, instance: str, sequence: str, epoch: int) -> None:
    """Name a sequence in the next acknowledgement to an instance."""
    if not state.acknowledge:
        state.emit(StartTimer(name=ACKNOWLEDGE_TIMER, at_ns=state.now_ns + ACKNOWLEDGE_AFTER_NS))
    state.acknowledge.setdefault(instance, []).append((sequence, epoch))


def send_acknowledgements(state: IngressState) -> None:
    """Send what was collected."""
    for instance, sequences in state.acknowledge.items():
        state.emit(
            Publish(
                subject=state.subjects.engine(instance, "acknowledge"), body=AcknowledgeSequences(sequences=sequences)
            )
        )
    state.acknowledge = {}


# The end of a call.


def refuse(state: IngressState, call: Call, refusal: Refusal) -> None:
    """Refuse a call at admission: nothing is kept of it."""
    _count_refusal(state, call.model, refusal.kind)
    state.emit(failure(call.request, refusal, accepted=False))


def _count_refusal(state: IngressState, model: str, kind: RefusalKind) -> None:
    state.metrics.refusals.add(kind.value)
    if kind is RefusalKind.QUEUE_FULL:
        state.metrics.vllm.of(model).rejected += 1


def complete_if_ended(state: IngressState, call: OpenCall) -> None:
    """Complete a call after its last choice ended."""
    if call.unended:
        return
    if call.listener.is_client:
        state.metrics.e2e.observe(state.now_ns - call.arrival_ns)
    state.metrics.vllm.of(call.call.model).complete(call, state.now_ns)
    _note_errors(state, call)
    call.listener.on_completed(call)
    _close(state, call, "completed", "")


def _note_errors(state: IngressState, call: OpenCall) -> None:
    """Compare the forecast with what happened, where all of the call ran on one instance."""
    forecast = call.forecast
    if forecast is None or call.continuations or call.migrations:
        return
    state.metrics.note_error("e2e", forecast.e2e_ns, state.now_ns - call.placed_ns)
    if call.first_token_ns:
        state.metrics.note_error("ttft", forecast.ttft_ns, call.first_token_ns - call.placed_ns)


def abandon(state: IngressState, call: OpenCall, reason: str) -> None:
    """End a call whose client left: nothing more is delivered."""
    _cancel_all(state, call, reason)
    _close(state, call, "cut" if reason == "slow_reader" else "cancelled", reason)


def refuse_or_fail(state: IngressState, call: OpenCall, kind: RefusalKind, detail: str, *, param: str = "") -> None:
    """End a call that cannot be served: refused if it was not accepted, else failed."""
    _cancel_all(state, call, kind.value)
    _count_refusal(state, call.call.model, kind)
    retry_after_s = 1.0 if kind in (RefusalKind.QUEUE_FULL, RefusalKind.NO_INSTANCE) else 0.0
    call.listener.on_failed(call, Refusal(kind, detail, param, retry_after_s))
    fields = {"kind": kind.value, "detail": detail}
    state.emit(Log(level="warning", event="call_failed", fields=fields, request=call.request))
    _close(state, call, "failed" if call.accepted else "refused", detail)


def end_late_calls(state: IngressState) -> None:
    """End calls past their deadlines, and note the next deadline: a scan per tick would cost more than the rest."""
    for call in [c for c in state.calls.values() if c.deadline_ns <= state.now_ns]:
        waited_s = (state.now_ns - call.arrival_ns) / SECOND_NS
        detail = f"The request was not done within its time limit of {waited_s:.0f} s."
        refuse_or_fail(state, call, RefusalKind.TIMEOUT, detail)
    state.deadline_ns = min((c.deadline_ns for c in state.calls.values()), default=NO_DEADLINE_NS)


def end_cut_off_calls(state: IngressState) -> None:
    """While the bus is away: calls wait for as long as for an instance, and accepted ones as long as a continuation."""
    for call in list(state.calls.values()):
        why = state.cut_off(state.now_ns, state.times.continuation if call.accepted else state.times.wait)
        if why:
            kind = RefusalKind.CONTINUATION_FAILED if call.accepted else RefusalKind.NO_INSTANCE
            refuse_or_fail(state, call, kind, why)


def _cancel_all(state: IngressState, call: OpenCall, reason: str) -> None:
    for sequence in call.sequences:
        if sequence.phase is not SequencePhase.ENDED:
            state.fire(sequence, Cancelled(reason))
    state.pending.pop(call.tagging, None)


def _close(state: IngressState, call: OpenCall, outcome: str, detail: str) -> None:
    """Release what a call that ended was counted with; publish its outcome and record its root span."""
    del state.calls[call.request]
    if call.listener.is_client:
        choices = len(call.call.prompts) * call.call.n
        state.admission.release(call.call, choices, call.output_tokens, state.now_ns)
    state.metrics.calls.add(call.call.model, outcome)
    finished = _finished(state, call, outcome, detail)
    if call.accepted:
        publish_outcome(state, call.call, finished)
    tracing.end_call(state, call, finished)
    if call.listener.is_client:  # a cascade looks at its attempts' outputs later
        call.sequences = []  # each names its call: only a search for reference cycles would free them


def publish_outcome(state: IngressState, call: Call, finished: RequestFinished) -> None:
    """Publish the outcome of an accepted call."""
    subject = state.subjects.outcome(call.model)
    state.emit(Publish(subject=subject, body=finished, request=call.request, traceparent=call.traceparent))


def _finished(state: IngressState, call: OpenCall, outcome: str, detail: str) -> RequestFinished:
    forecast = call.forecast
    return RequestFinished(
        request=call.request,
        model=call.call.model,
        outcome=outcome,
        ingress=state.name,
        key=call.call.key,
        detail=detail,
        prompt_tokens=call.prompt_tokens,
        cached_tokens=call.cached_tokens,
        output_tokens=[len(s.log) for s in call.sequences],
        finish_reasons=[s.output.finish_reason for s in call.sequences],
        continuations=call.continuations,
        predicted_output_tokens=call.predicted,
        arrival_ns=call.arrival_ns,
        ttft_ns=call.first_token_ns - call.arrival_ns if call.first_token_ns else None,
        e2e_ns=state.now_ns - call.arrival_ns,
        instances=call.instances,
        predicted_ttft_ns=None if forecast is None else forecast.ttft_ns,
        predicted_e2e_ns=None if forecast is None else forecast.e2e_ns,
        placed_ns=call.placed_ns,
        migrations=call.migrations,
        predicted_cached_tokens=None if forecast is None else forecast.cached_tokens,
        block_hashes=call.sequences[0].decoded_blocks(),
        parent=call.call.parent,
    )
