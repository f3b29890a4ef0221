"""Failover: a sequence whose instance is lost is resubmitted elsewhere, from prompt and token log, in the next epoch.

    trigger                                                                  reason
    presence says DEAD                                                       instance_dead
    a new incarnation of the instance shows itself                           instance_restarted
    no summary for ``instance_silence_ms``                                   instance_silent
    no sign of life of the engine process (``instance_loss.py``)                     instance_hung
    SequencesReturned                                                        returned_draining, returned_engine_died,
                                                                             returned_requested
    a chunk with FinishReason.ERROR, or CANCELLED that ingress did not ask   engine_gave_up
    ErrorReply, or a resend that nobody answers                               tokens_forgotten, resend_failed
    no token for ``stall_s`` although the instance lives                     stalled

Each trigger fires ``InstanceLost``. While a migration is under way its target is asked first
(``migration/ownership.py``). While the bus is away, and ``RECONNECT_GRACE_NS`` after, silence means nothing.
"""

from __future__ import annotations

from millrace.actor.effects import Log

from services.ingress import tracing
from services.ingress.calls.completion import cancel_at, complete_if_ended, detach, end_sequence, refuse_or_fail
from services.ingress.calls.messages import RefusalKind
from services.ingress.dispatch.dispatcher import dispatch
from services.ingress.lifecycle import Deferred, InstanceLost, LossCause
from services.ingress.migration.epoch_grants import revoke
from services.ingress.sequence import OpenSequence
from services.ingress.state import IngressState
from services.ingress.times import MILLISECOND_NS
from services.ingress.tokens.token_log import end_text

#: First pause of a sequence that failed over before without a new token since; doubles each time. It keeps a request
#: that crashes every engine from doing so at full speed.
FRUITLESS_PAUSE_NS = 100 * MILLISECOND_NS

#: Why a sequence is dispatched anew whose instance lives, and gave it back in order: a queued one may meet as many
#: drains as there are instances, and is given up for none of them.
IN_ORDER = ("returned_requested", "returned_draining")


def fail_over(state: IngressState, sequence: OpenSequence, event: InstanceLost) -> None:
    """Take a sequence from its instance and dispatch it anew."""
    instance = sequence.instance
    assert instance is not None
    leave_instance(state, sequence, event)
    revoke(state, sequence, "lost")
    redispatch(state, sequence, instance.name)


def finish_from_log(state: IngressState, sequence: OpenSequence, event: InstanceLost) -> None:
    """The log already ends as its engine would have ended it: only the engine's last message was lost."""
    sequence.call.deliver([end_text(state, sequence, finish_reason_of(state, sequence))])
    end_sequence(state, sequence, decoding=True, reason=event.why)
    complete_if_ended(state, sequence.call)


def log_complete(state: IngressState, sequence: OpenSequence, event: InstanceLost) -> bool:
    """Whether the log already ends as its engine would have ended it."""
    return bool(finish_reason_of(state, sequence))


def finish_reason_of(state: IngressState, sequence: OpenSequence) -> str:
    """``stop`` or ``length`` if the log ends as its engine would have ended it; else empty."""
    log = sequence.log
    if len(log) >= sequence.tokens_max:
        return "length"
    if log and len(log) >= sequence.sampling.min_tokens:
        last = log[-1]
        if last in sequence.sampling.stop_token_ids:
            return "stop"
        if not sequence.sampling.ignore_eos and last in state.models[sequence.call.call.model].eos_token_ids:
            return "stop"
    return ""


# Parts of them.


def leave_instance(state: IngressState, sequence: OpenSequence, event: InstanceLost) -> None:
    """Take a sequence from its instance, which is not tried again for it soon."""
    assert sequence.instance is not None
    why = event.why
    sequence.retry.errors += event.cause is LossCause.ENGINE_ERROR
    lost = event.cause in (LossCause.ENGINE_DIED, LossCause.ENGINE_SILENT)
    sequence.retry.deaths += lost and (sequence.retry.suspect or not sequence.submit)
    tracing.end_placement(state, sequence, why)
    sequence.retry.excluded[sequence.instance.name] = sequence.incarnation
    detach(state, sequence)
    sequence.retry.why = why
    if sequence.retry.since_ns == 0 or not sequence.retry.lost:
        sequence.retry.since_ns = state.now_ns
    sequence.retry.lost = True


def redispatch(state: IngressState, sequence: OpenSequence, lost_by: str) -> None:
    """Dispatch a sequence from prompt and log, unless that was fruitless too often."""
    call, retry = sequence.call, sequence.retry
    cancel_at(state, sequence, lost_by, retry.why)
    if sequence.owned:
        _count(state, sequence, lost_by)
    if retry.fruitless > state.config.continuation.fruitless_max:
        detail = f"{retry.fruitless} instances in a row lost this request without a new token (last: {retry.why})."
        refuse_or_fail(state, call, RefusalKind.CONTINUATION_FAILED, detail)
    elif retry.fruitless > 1:
        state.fire(sequence, Deferred(FRUITLESS_PAUSE_NS << min(retry.fruitless - 2, 5)))
    else:
        dispatch(state, [sequence])


def _count(state: IngressState, sequence: OpenSequence, lost_by: str) -> None:
    call, why = sequence.call, sequence.retry.why
    state.metrics.continuations.add(why)
    call.continuations += 1
    sequence.retry.fruitless += why not in IN_ORDER
    state.emit(
        Log(
            level="info",
            event="continuation",
            fields={"sequence": sequence.id, "why": why, "from": lost_by, "tokens": len(sequence.log)},
            request=call.request,
            traceparent=call.call.traceparent,
        )
    )
