"""Resends: an instance is asked for the tokens after a sequence's log.

The next chunk shows that tokens are missing; after the *last* chunk there is none, so a sequence that is silent for
``PROBE_NS`` is asked about too, ever more rarely. After an outage of the bus each running sequence that is still silent
is asked about: lost tokens arrive, or the worker has forgotten it.
"""

from __future__ import annotations

from millrace.actor.effects import Request
from millrace.contracts.local import RequestFailure
from millrace.contracts.worker import ResendTokens

from services.ingress.dispatch.candidates import has_alternative
from services.ingress.lifecycle import InstanceLost, SequencePhase, TokensMissing
from services.ingress.pending import PendingResend
from services.ingress.sequence import OpenSequence
from services.ingress.state import IngressState
from services.ingress.times import PROBE_NS, RESEND_TIMEOUT_NS

#: Unanswered resends in a row that are asked again. One: a second's hiccup must not cost a whole recompute.
RESEND_FAILURES_MAX = 1


def request_resend(state: IngressState, sequence: OpenSequence, event: TokensMissing) -> None:
    """Reaction to missing tokens: ask the instance."""
    ask_resend(state, sequence)


def ask_resend(state: IngressState, sequence: OpenSequence) -> None:
    """Ask the instance for everything after the log; one open question per sequence."""
    if sequence.resend.correlation or sequence.instance is None or not state.connected:
        return
    sequence.resend.correlation = state.correlation("resend", PendingResend(sequence, sequence.epoch))
    state.emit(
        Request(
            subject=state.subjects.engine(sequence.instance.name, "resend"),
            body=ResendTokens(sequence=sequence.id, epoch=sequence.epoch, from_index=len(sequence.log)),
            correlation=sequence.resend.correlation,
            timeout_ns=RESEND_TIMEOUT_NS,
            request=sequence.call.request,
        )
    )


def resend_unanswered(state: IngressState, pending: PendingResend, reason: RequestFailure) -> None:
    """Ask a worker that did not answer once more; one without a subscription is gone."""
    sequence = pending.sequence
    resend = sequence.resend
    resend.correlation = ""
    state.metrics.resends.add(reason.value)
    if reason is RequestFailure.DISCONNECTED or not state.detecting(state.now_ns):
        return
    resend.failures += 1
    if reason is RequestFailure.NO_RESPONDERS or resend.failures > RESEND_FAILURES_MAX:
        resend.failures = 0
        state.fire(sequence, InstanceLost("resend_failed"))
    else:
        ask_resend(state, sequence)


def look_at_sequences(state: IngressState) -> None:
    """Probe silent sequences and fail over stalled ones. Called about once a second while detecting."""
    now_ns, running = state.now_ns, SequencePhase.RUNNING
    quiet_ns = min(PROBE_NS, state.times.stall, state.times.queue_stall)
    for sequence in list(state.sequences.values()):
        if sequence.phase is not running:
            continue
        since_ns = sequence.last_ns if sequence.last_ns > sequence.placed_ns else sequence.placed_ns
        resend = sequence.resend
        if now_ns - since_ns < quiet_ns:  # nearly all
            if resend.at_ns <= since_ns:  # a token arrived since the last probe: begin anew
                resend.after_ns = PROBE_NS
            continue
        queued = sequence.fresh and not sequence.moved
        limit_ns = state.times.queue_stall if queued else state.times.stall
        if now_ns - since_ns > limit_ns and has_alternative(state, sequence):
            state.fire(sequence, InstanceLost("stalled"))
        elif now_ns >= max(since_ns + PROBE_NS, resend.at_ns + resend.after_ns):
            _probe(state, sequence)
        elif resend.at_ns <= since_ns:
            resend.after_ns = PROBE_NS


def _probe(state: IngressState, sequence: OpenSequence) -> None:
    resend = sequence.resend
    resend.at_ns = state.now_ns
    resend.after_ns = min(2 * resend.after_ns, max(PROBE_NS, state.times.stall // 4))
    state.fire(sequence, TokensMissing())


def ask_after_outage(state: IngressState) -> None:
    """The bus has been back for the grace time: ask about whoever is still silent."""
    for sequence in state.sequences.values():
        if sequence.phase is SequencePhase.RUNNING and sequence.last_ns < state.outage_end_ns:
            state.fire(sequence, TokensMissing())
