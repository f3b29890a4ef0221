"""Continuation: a sequence whose instance is lost goes on elsewhere, from prompt and token log, in the next epoch.

    trigger                                                                  reason
    presence says DEAD                                                       instance_dead
    a new incarnation of the instance shows itself                           instance_restarted
    no summary for ``silence_s``                                             instance_silent
    SequencesReturned                                                        returned_draining, returned_engine_died
    a chunk with FinishReason.ERROR, or CANCELLED that ingress did not ask   engine_gave_up
    TokensForgotten, or a resend that nobody answers                         tokens_forgotten, resend_failed
    no token for ``stall_s`` although the instance lives                     stalled

A sequence that a migration has under way is not computed anew at once: its target may have it already, and is asked
first (moving.py).

While the bus is away, and ``reconnect_grace_s`` after, silence means nothing. Then each running sequence that is
still silent is asked about (ResendTokens): tokens lost in the outage come, or the worker has forgotten it.

Missing tokens are noticed by the next chunk (a gap); a missing *last* chunk has no next one, so a sequence that is
silent for ``probe_s`` is asked about too, ever more rarely.
"""

from __future__ import annotations

from millrace.actor.effects import Effect, Log, Request
from millrace.contracts.local import RequestFailure
from millrace.contracts.worker import ResendTokens

from services.ingress import tracing
from services.ingress.calls.completion import cancel_at, complete, detach, end_sequence, refuse_or_fail
from services.ingress.calls.messages import RefusalKind
from services.ingress.cluster.instances import KnownInstance
from services.ingress.dispatch.submission import arm_place_timer, place
from services.ingress.migration.epoch_grants import ask_proof, void
from services.ingress.pending import PendingResend
from services.ingress.state import IngressState, OpenSequence, SequencePhase
from services.ingress.times import MILLISECOND_NS
from services.ingress.tokens.token_log import deliver, speak_end

#: First pause of a sequence that was continued before without a new token since; doubles each time. It keeps a
#: request that crashes every engine from doing so at full speed.
FRUITLESS_PAUSE_NS = 100 * MILLISECOND_NS
#: Unanswered resends in a row that are asked again. One: a second's hiccup must not cost a whole recompute.
RESEND_FAILURES_MAX = 1


def continue_elsewhere(state: IngressState, sequence: OpenSequence, why: str, out: list[Effect]) -> None:
    """Takes a sequence from its instance; it goes on at a migration's target, or is placed anew."""
    instance = sequence.instance
    assert instance is not None
    tracing.end_placement(sequence, sequence.span_attributes, why, state.now_ns, out)
    sequence.span_attributes = None
    sequence.excluded[instance.name] = sequence.incarnation
    detach(state, sequence)
    sequence.why = why
    if sequence.waiting_since_ns == 0:
        sequence.waiting_since_ns = state.now_ns
    if not _ask_target(state, sequence, out):
        _place_anew(state, sequence, instance.name, out)


def _ask_target(state: IngressState, sequence: OpenSequence, out: list[Effect]) -> bool:
    """Asks the target of the open allotment whether it has it. False where there is none, or it is gone as well.

    Meanwhile the source, should it live, is left alone: the target may be reading its last blocks there. Once the
    target owns the sequence, what the source still says of it has it cancelled there.
    """
    allotment = sequence.allotment
    if allotment is None:
        return False
    target = allotment.instance
    if target.dead or target.incarnation != allotment.incarnation or not state.connected:
        void(state, sequence, "lost", out)
        return False
    sequence.phase = SequencePhase.PROVING
    ask_proof(state, sequence, out)
    return True


def _place_anew(state: IngressState, sequence: OpenSequence, lost_by: str, out: list[Effect]) -> None:
    """Nobody has it: it is placed from prompt and log, unless that was fruitless too often."""
    call, why = sequence.call, sequence.why
    cancel_at(state, sequence, lost_by, why, out)
    sequence.phase = SequencePhase.WAITING
    if sequence.owned:
        state.metrics.continuations.add(why)
        call.continuations += 1
        sequence.fruitless += 1
        out.append(
            Log(
                level="info",
                event="continuation",
                fields={"sequence": sequence.id, "why": why, "from": lost_by, "tokens": len(sequence.log)},
                request=call.request,
                traceparent=call.call.traceparent,
            )
        )
    if sequence.fruitless > state.config.continuation.fruitless_max:
        detail = f"{sequence.fruitless} instances in a row lost this request without a new token (last: {why})."
        refuse_or_fail(state, call, RefusalKind.CONTINUATION_FAILED, detail, out)
    elif sequence.fruitless > 1:
        _pause(state, sequence, out)
    else:
        place(state, [sequence], out)


def _pause(state: IngressState, sequence: OpenSequence, out: list[Effect]) -> None:
    sequence.rounds += 1
    sequence.retry_at_ns = state.now_ns + (FRUITLESS_PAUSE_NS << min(sequence.fruitless - 2, 5))
    state.waiting[sequence.id] = sequence
    arm_place_timer(state, sequence.retry_at_ns, out)


def continue_all(
    state: IngressState, instance: KnownInstance, why: str, out: list[Effect], *, before_incarnation: int | None = None
) -> None:
    """Everything that an instance had goes on elsewhere (or what was given to it before that incarnation), and what
    was to move there does not.
    """
    for sequence in list(state.owned.get(instance.name, {}).values()):
        if sequence.phase is SequencePhase.ENDED:  # its call was given up by an earlier one
            continue
        if before_incarnation is None or sequence.incarnation < before_incarnation:
            continue_or_end(state, sequence, why, out)
    for sequence in list(state.allotted.get(instance.name, {}).values()):
        allotment = sequence.allotment
        if allotment is not None and (before_incarnation is None or allotment.incarnation < before_incarnation):
            lose_target(state, sequence, out)


def lose_target(state: IngressState, sequence: OpenSequence, out: list[Effect]) -> None:
    """The target of a migration is gone. Its source may have let go of the sequence already, and is asked at once."""
    assert sequence.allotment is not None
    source = sequence.allotment.source.name
    void(state, sequence, "lost", out)
    if sequence.phase is SequencePhase.PROVING:
        _place_anew(state, sequence, source, out)
    else:
        ask_resend(state, sequence, out)


def continue_or_end(state: IngressState, sequence: OpenSequence, why: str, out: list[Effect]) -> None:
    """Continues a sequence, unless its log already fulfils its end and only the word for it was lost."""
    reason = fulfilled(state, sequence)
    if not reason:
        continue_elsewhere(state, sequence, why, out)
        return
    delta = speak_end(sequence, reason)
    if delta is not None:
        deliver(sequence.call, [delta], out)
    end_sequence(state, sequence, decoding=True, reason=why, out=out)
    if not sequence.call.unended:
        complete(state, sequence.call, out)


def fulfilled(state: IngressState, sequence: OpenSequence) -> str:
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


def lost_earlier(state: IngressState, name: str, out: list[Effect]) -> None:
    """A new incarnation showed itself: what the earlier one had goes on elsewhere."""
    instance = state.cluster.instances[name]
    continue_all(state, instance, "instance_restarted", out, before_incarnation=instance.incarnation)


def ask_resend(state: IngressState, sequence: OpenSequence, out: list[Effect]) -> None:
    """Asks the instance for everything after the log. One question per sequence at a time."""
    if sequence.resend or sequence.instance is None or not state.connected:
        return
    sequence.resend = state.correlation("resend", PendingResend(sequence, sequence.epoch))
    out.append(
        Request(
            subject=state.subjects.engine(sequence.instance.name, "resend"),
            body=ResendTokens(sequence=sequence.id, epoch=sequence.epoch, from_index=len(sequence.log)),
            correlation=sequence.resend,
            timeout_ns=state.times.resend_timeout,
            request=sequence.call.request,
        )
    )


def resend_unanswered(state: IngressState, pending: PendingResend, reason: RequestFailure, out: list[Effect]) -> None:
    """Nobody answered. A worker that was only slow is asked once more; one without a subscription is gone."""
    sequence: OpenSequence = pending.sequence
    sequence.resend = ""
    state.metrics.resends.add(reason.value)
    if reason is RequestFailure.DISCONNECTED or not state.detecting(state.now_ns):
        return
    sequence.resend_failures += 1
    if reason is RequestFailure.NO_RESPONDERS or sequence.resend_failures > RESEND_FAILURES_MAX:
        sequence.resend_failures = 0
        continue_or_end(state, sequence, "resend_failed", out)
    else:
        ask_resend(state, sequence, out)


def look_at_sequences(state: IngressState, out: list[Effect]) -> None:
    """Probes silent sequences and continues stalled ones. Called about once a second while detecting."""
    now_ns, running, probe_ns = state.now_ns, SequencePhase.RUNNING, state.times.probe
    quiet_ns = min(probe_ns, state.times.stall, state.times.queue_stall)
    for sequence in list(state.sequences.values()):
        if sequence.phase is not running:
            continue
        since_ns = sequence.last_ns if sequence.last_ns > sequence.placed_ns else sequence.placed_ns
        if now_ns - since_ns < quiet_ns:  # nearly all
            if sequence.probed_ns <= since_ns:  # a token came since the last probe: begin anew
                sequence.probe_after_ns = probe_ns
            continue
        queued = sequence.fresh and not sequence.moved
        limit_ns = state.times.queue_stall if queued else state.times.stall
        if now_ns - since_ns > limit_ns and _elsewhere(state, sequence):
            continue_or_end(state, sequence, "stalled", out)
        elif now_ns >= max(since_ns + probe_ns, sequence.probed_ns + sequence.probe_after_ns):
            _probe(state, sequence, out)
        elif sequence.probed_ns <= since_ns:
            sequence.probe_after_ns = probe_ns


def _probe(state: IngressState, sequence: OpenSequence, out: list[Effect]) -> None:
    sequence.probed_ns = state.now_ns
    sequence.probe_after_ns = min(2 * sequence.probe_after_ns, max(state.times.probe, state.times.stall // 4))
    ask_resend(state, sequence, out)


def _elsewhere(state: IngressState, sequence: OpenSequence) -> bool:
    """Whether another instance could take it: leaving a slow one for nothing would lose what it has computed."""
    length = len(sequence.prompt) + len(sequence.log)
    stages = state.cluster.stages(sequence.call.call.model, length)
    return any(i.usable and i is not sequence.instance for stage in stages for i in stage.instances)


def ask_after_outage(state: IngressState, out: list[Effect]) -> None:
    """The bus is back for the grace time: whoever is still silent may have lost tokens."""
    for sequence in state.sequences.values():
        if sequence.phase is SequencePhase.RUNNING and sequence.last_ns < state.outage_end_ns:
            ask_resend(state, sequence, out)
