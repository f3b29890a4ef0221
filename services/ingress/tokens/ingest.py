"""TokensGenerated and TokensResent: which sequences they belong to, what goes to clients, what follows for engines."""

from __future__ import annotations

from typing import Any

from millrace.actor.effects import Effect
from millrace.contracts.ingress import TokenChunk, TokensGenerated, TokensResent

from services.ingress.calls.completion import complete, end_sequence
from services.ingress.calls.messages import ChoiceDelta
from services.ingress.cluster.instances import KnownInstance
from services.ingress.dispatch.submission import accepted
from services.ingress.failover.failover import ask_resend, continue_or_end, lost_earlier
from services.ingress.migration.epoch_grants import allotted_to, ask_proof
from services.ingress.pending import PendingResend
from services.ingress.state import IngressState, OpenCall, OpenSequence, SequencePhase
from services.ingress.tokens.stale import note_stray
from services.ingress.tokens.token_log import Taken, deliver, take_chunk


def relay(state: IngressState, message: TokensGenerated, out: list[Effect]) -> None:
    """Takes all tokens of one engine step."""
    instance = _sender(state, message, out)
    if instance is None:
        state.metrics.discarded.add("late", by=len(message.chunks))
        return
    sequences, running, goes_on = state.sequences, SequencePhase.RUNNING, Taken.GOES_ON
    several: dict[str, OpenCall] = {}
    for chunk in message.chunks:
        sequence = sequences.get(chunk.sequence)
        if sequence is None or chunk.epoch != sequence.epoch or sequence.instance is not instance:
            if sequence is not None and allotted_to(sequence, chunk.epoch, instance):
                state.metrics.discarded.add("unproven")
                ask_proof(state, sequence, out)
            else:
                note_stray(state, chunk, sequence, message.instance, out)
            continue
        if sequence.phase is not running:
            accepted(state, sequence, out)
        call = sequence.call
        if call.several:
            several[call.request] = call
            _take_among_several(state, sequence, chunk)
            continue
        taken, delta = take_chunk(state, sequence, chunk)
        if delta is not None:
            deliver(call, [delta], out)
        if taken is not goes_on:
            _settle(state, sequence, taken, out)
    for call in several.values():
        _settle_several(state, call, out)


def _sender(state: IngressState, message: TokensGenerated, out: list[Effect]) -> KnownInstance | None:
    """The instance in the incarnation that speaks; None for an earlier incarnation than the known one.

    A newer one than the known one means that the earlier is gone.
    """
    instance = state.cluster.instances.get(message.instance)
    if instance is not None and message.incarnation == instance.incarnation:
        return instance
    if state.cluster.meet(message.instance, message.incarnation, state.now_ns):
        lost_earlier(state, message.instance, out)
    instance = state.cluster.instances.get(message.instance)
    return instance if instance is not None and message.incarnation == instance.incarnation else None


def _take_among_several(state: IngressState, sequence: OpenSequence, chunk: TokenChunk) -> None:
    """One choice of several: kept until the whole message is read, so that the call gets one delivery."""
    if sequence.finish_reason:  # it ended earlier in this message
        state.metrics.discarded.add("duplicate")
        return
    taken, delta = take_chunk(state, sequence, chunk)
    if delta is not None:
        sequence.call.touched.append(delta)
    if taken is not Taken.GOES_ON:
        sequence.call.settling.append((sequence, taken))


def _settle_several(state: IngressState, call: OpenCall, out: list[Effect]) -> None:
    """One delivery for all choices of a call that this message touched, then what became of them."""
    deltas: list[ChoiceDelta] = call.touched
    settling = call.settling
    call.touched, call.settling = [], []
    if deltas:
        deliver(call, deltas, out)
    for sequence, taken in settling:
        if sequence.phase is not SequencePhase.ENDED:  # its call may have been given up by an earlier one
            _settle(state, sequence, taken, out)


def _settle(state: IngressState, sequence: OpenSequence, taken: Taken, out: list[Effect]) -> None:
    """Carries out what became of a chunk."""
    call = sequence.call
    if taken is Taken.ENDED or taken is Taken.STOPPED:
        end_sequence(state, sequence, decoding=taken is Taken.STOPPED, reason="stopped", out=out)
        if not call.unended:
            complete(state, call, out)
    elif taken is Taken.GAP:
        ask_resend(state, sequence, out)
    elif taken is Taken.LOST:
        continue_or_end(state, sequence, "engine_gave_up", out)


def take_resent(state: IngressState, pending: PendingResend, answer: Any, out: list[Effect]) -> None:
    """The answer to ResendTokens: the missing tokens, nothing new, or the worker knows nothing of it."""
    sequence: OpenSequence = pending.sequence
    sequence.resend = ""
    sequence.resend_failures = 0
    if not isinstance(answer, TokensResent) or answer.chunk.sequence != sequence.id:
        state.metrics.resends.add("forgotten")
        continue_or_end(state, sequence, "tokens_forgotten", out)
        return
    chunk = answer.chunk
    if chunk.epoch != sequence.epoch or not (chunk.token_ids or chunk.finish is not None):
        state.metrics.resends.add("nothing_new")
        return
    state.metrics.resends.add("recovered")
    take_late(state, sequence, chunk, out)


def take_late(state: IngressState, sequence: OpenSequence, chunk: TokenChunk, out: list[Effect]) -> None:
    """Takes a chunk that was asked for, and carries out what became of it."""
    taken, delta = take_chunk(state, sequence, chunk)
    if delta is not None:
        deliver(sequence.call, [delta], out)
    if taken is not Taken.GOES_ON:
        _settle(state, sequence, taken, out)
