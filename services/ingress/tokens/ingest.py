"""Token ingest: hands the chunks of TokensGenerated and TokensResent to their sequences.

Tokens that continue the log go to the client. Everything else is an event of the sequence (``lifecycle.py``), or stale:
a chunk that belongs to no sequence here is dropped and counted, and its engine is told to stop.
"""

from __future__ import annotations

from typing import Any

from millrace.contracts.ingress import TokenChunk, TokensGenerated, TokensResent

from services.ingress.calls.completion import acknowledge
from services.ingress.cluster.instances import KnownInstance
from services.ingress.failover.instance_loss import lose_earlier_incarnation
from services.ingress.lifecycle import Accepted, InstanceLost, SequencePhase
from services.ingress.migration.epoch_grants import ask_proof, granted_to
from services.ingress.pending import PendingResend
from services.ingress.sequence import OpenSequence
from services.ingress.state import IngressState
from services.ingress.times import SECOND_NS
from services.ingress.tokens.token_log import take_chunk

#: A stale sequence is cancelled at most this often: a cancel takes a step to work, and chunks go on until then.
CANCEL_EVERY_NS = 1 * SECOND_NS
#: Stale sequences remembered. Beyond it all are forgotten, which costs one more cancel each.
STALE_MAX = 4_096


def ingest_tokens(state: IngressState, message: TokensGenerated) -> None:
    """Take all tokens of one engine step."""
    instance = _sender(state, message)
    if instance is None:
        state.metrics.discarded.add("late", by=len(message.chunks))
        return
    sequences, running = state.sequences, SequencePhase.RUNNING
    for chunk in message.chunks:
        sequence = sequences.get(chunk.sequence)
        if sequence is None or chunk.epoch != sequence.epoch or sequence.instance is not instance:
            _take_foreign(state, sequence, chunk, instance)
            continue
        if sequence.phase is not running:
            state.fire(sequence, Accepted())
        take_own(state, sequence, chunk)


def take_own(state: IngressState, sequence: OpenSequence, chunk: TokenChunk) -> None:
    """Take a chunk of the instance that owns the sequence, deliver its text, and fire the event that it is."""
    event, delta = take_chunk(state, sequence, chunk)
    if delta is not None:
        sequence.call.deliver([delta])
    if event is not None:
        state.fire(sequence, event)


def _sender(state: IngressState, message: TokensGenerated) -> KnownInstance | None:
    """The instance in the incarnation that sent this; None for an earlier incarnation than the known one.

    A newer one than the known one means that the earlier is gone.
    """
    instance = state.cluster.instances.get(message.instance)
    if instance is not None and message.incarnation == instance.member.incarnation:
        return instance
    if state.cluster.observe_incarnation(message.instance, message.incarnation, state.now_ns):
        lose_earlier_incarnation(state, message.instance)
    instance = state.cluster.instances.get(message.instance)
    return instance if instance is not None and message.incarnation == instance.member.incarnation else None


def _take_foreign(
    state: IngressState, sequence: OpenSequence | None, chunk: TokenChunk, instance: KnownInstance
) -> None:
    """Refuse a chunk that is not the owner's: of a granted epoch until its target is proven, else stale."""
    if sequence is not None and granted_to(sequence, chunk.epoch, instance):
        state.metrics.discarded.add("unproven")
        ask_proof(state, sequence)
    else:
        drop_stale(state, chunk, sequence, instance.name)


def take_resent(state: IngressState, pending: PendingResend, answer: Any) -> None:
    """Take the answer to ResendTokens: the missing tokens, nothing new, or the worker has forgotten the sequence."""
    sequence = pending.sequence
    sequence.resend.correlation = ""
    sequence.resend.failures = 0
    missing = isinstance(answer, TokensResent) and answer.chunk.first_index > len(sequence.log)
    if missing or not isinstance(answer, TokensResent) or answer.chunk.sequence != sequence.id:
        state.metrics.resends.add("forgotten")
        state.fire(sequence, InstanceLost("tokens_forgotten"))
        return
    chunk = answer.chunk
    if chunk.epoch != sequence.epoch or not (chunk.token_ids or chunk.finish is not None):
        state.metrics.resends.add("nothing_new")
        return
    state.metrics.resends.add("recovered")
    take_own(state, sequence, chunk)


# Stale tokens.


def drop_stale(state: IngressState, chunk: TokenChunk, sequence: OpenSequence | None, instance: str) -> None:
    """Drop a chunk of an ended or unknown sequence, of an old epoch, or from an instance that does not own it.

    A finished sequence is acknowledged (the acknowledgement may have been lost), a running one is cancelled (the cancel
    may have been lost), also in a revoked epoch. A chunk of the present epoch, or of one that was never given out, is
    neither: nothing here could have caused it.
    """
    state.metrics.discarded.add("late")
    if sequence is not None and (chunk.epoch == sequence.epoch or chunk.epoch > sequence.epoch_max):
        return
    if chunk.finish is not None:
        acknowledge(state, instance, chunk.sequence, chunk.epoch)
        return
    cancel_stale(state, chunk.sequence, chunk.epoch, instance)


def cancel_stale(state: IngressState, sequence: str, epoch: int, instance: str) -> None:
    """Cancel a sequence, up to an epoch, at an instance that does not own it; not too often."""
    now_ns, key = state.now_ns, (sequence, instance)
    if state.stale_until_ns.get(key, 0) > now_ns:
        return
    if len(state.stale_until_ns) >= STALE_MAX:
        state.stale_until_ns.clear()
    state.stale_until_ns[key] = now_ns + CANCEL_EVERY_NS
    state.cancel(sequence, epoch, instance, "stray")
