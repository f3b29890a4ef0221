"""Ownership of a migrating sequence. Only ingress has the token log, so ingress judges who owns it.

The source owns it until the target is proven to. What proves it, by the messages and the log, is a table of the README
("Migration").

No token of a granted epoch is taken before its target is known to continue this very log, and none of the source's
after. Both may decode for a moment, in different epochs; a source that goes on is cancelled in its old epoch, as any
stale sequence is.
"""

from __future__ import annotations

from typing import Any

from millrace.actor.effects import Log
from millrace.contracts.ingress import TokenChunk, TokensResent
from millrace.contracts.migration import SequenceMoved

from services.ingress import tracing
from services.ingress.calls.completion import detach
from services.ingress.failover.failover import leave_instance, redispatch
from services.ingress.failover.resend import ask_resend
from services.ingress.lifecycle import InstanceLost, Migrated, SequencePhase, TargetLost, TokensMissing
from services.ingress.migration.epoch_grants import ask_proof, close, granted_to, revoke
from services.ingress.migration.replicas import free_replica
from services.ingress.pending import PendingProof
from services.ingress.sequence import EpochGrant, OpenSequence
from services.ingress.state import IngressState
from services.ingress.times import PROBE_NS
from services.ingress.tokens.ingest import cancel_stale, take_own


def take_move(state: IngressState, body: SequenceMoved) -> None:
    """Handle a worker's message that a sequence migrated to it."""
    sequence = state.sequences.get(body.sequence)
    instance = state.cluster.instances.get(body.instance)
    if sequence is None or instance is None or body.incarnation != instance.member.incarnation:
        _not_owner(state, sequence, body)
    elif sequence.instance is instance and sequence.epoch == body.epoch:
        _request_missing(state, sequence, body.first_index)
    elif not granted_to(sequence, body.epoch, instance):
        _not_owner(state, sequence, body)
    elif len(sequence.log) <= body.first_index:
        state.fire(sequence, Migrated())
        _request_missing(state, sequence, body.first_index)
    elif sequence.phase is SequencePhase.RUNNING:  # else the target's answer tells whether its tokens are the log's
        revoke(state, sequence, "stayed")


def _request_missing(state: IngressState, sequence: OpenSequence, first_index: int) -> None:
    if sequence.phase is SequencePhase.RUNNING and len(sequence.log) < first_index:
        state.fire(sequence, TokensMissing())


def _not_owner(state: IngressState, sequence: OpenSequence | None, body: SequenceMoved) -> None:
    """Cancel it there: it ended, or the epoch is over or revoked. An epoch that was never granted is left alone."""
    if sequence is None or (body.epoch != sequence.epoch and body.epoch <= sequence.epoch_max):
        cancel_stale(state, body.sequence, body.epoch, body.instance)


def switch_owner(state: IngressState, sequence: OpenSequence, event: Migrated) -> None:
    """Make the target the owner, in the granted epoch.

    The source's migrator releases the sequence there. If that message is lost the source resumes; its next chunk is
    stale and cancels it.
    """
    source, call = sequence.instance, sequence.call
    outcome = "moved" if source is not None else "rescued"
    left = source.name if source is not None else sequence.retry.why
    grant = close(state, sequence, outcome)
    assert grant is not None
    free_replica(state, sequence)
    detach(state, sequence)
    target = grant.instance
    sequence.epoch, sequence.instance, sequence.incarnation = grant.epoch, target, grant.incarnation
    sequence.fresh = sequence.moved = True
    sequence.retry.owned()
    sequence.resend.after_ns = PROBE_NS
    sequence.placed_ns = state.now_ns
    target.place(sequence.id, 0)  # the target's summaries count its blocks already, and nothing is to be computed
    target.accept(sequence.id)
    state.owned.setdefault(target.name, {})[sequence.id] = sequence
    if sequence.blocks is not None:
        state.holders.note(sequence.blocks, target.name)
    call.migrations += 1
    if target.name not in call.instances:
        call.instances.append(target.name)
    tracing.end_move(state, sequence, grant, source=left, outcome=outcome)
    fields = {"sequence": sequence.id, "from": left, "to": target.name, "tokens": len(sequence.log)}
    trace = call.call.traceparent
    state.emit(Log(level="info", event="migration", fields=fields, request=call.request, traceparent=trace))


def verify_target(state: IngressState, sequence: OpenSequence, event: InstanceLost) -> None:
    """The source is lost: ask the target whether it holds the sequence.

    A source that lives is left alone meanwhile: the target may be reading its last blocks there. Once the target owns
    the sequence, the source's next chunk is stale and cancels it there.
    """
    leave_instance(state, sequence, event)
    ask_proof(state, sequence)


def stay_with_source(state: IngressState, sequence: OpenSequence, event: TargetLost) -> None:
    """The target is lost. Its source may have released the sequence already, and is asked at once."""
    revoke(state, sequence, "lost")
    ask_resend(state, sequence)


def give_up_target(state: IngressState, sequence: OpenSequence, event: TargetLost) -> None:
    """Source and target are lost: dispatch the sequence anew."""
    assert sequence.grant is not None
    source = sequence.grant.source.name
    revoke(state, sequence, "lost")
    redispatch(state, sequence, source)


def take_proof(state: IngressState, pending: PendingProof, answer: Any) -> None:
    """Judge the target's tokens: it is the owner if they are the log's, and at least as many."""
    sequence = pending.sequence
    pending.grant.proof = ""  # the grant is still open: closing it forgets its question
    if not isinstance(answer, TokensResent):
        state.metrics.resends.add("forgotten")
        state.fire(sequence, TargetLost())
    elif state.connected and _begins_later(sequence, answer.chunk):
        _take_base(state, sequence, answer.chunk.first_index)
    elif _continues(sequence, answer.chunk):
        state.metrics.resends.add("proven")
        state.fire(sequence, Migrated())
        take_own(state, sequence, answer.chunk)
    elif sequence.phase is SequencePhase.VERIFYING:
        state.fire(sequence, TargetLost())
    else:
        revoke(state, sequence, "stayed")


def _take_base(state: IngressState, sequence: OpenSequence, base: int) -> None:
    """The target holds its tokens from ``base`` on; those before it came with the migration, from the source."""
    assert sequence.grant is not None
    if len(sequence.log) > base:
        sequence.grant.tokens = base
        ask_proof(state, sequence)
        return
    state.fire(sequence, Migrated())
    state.fire(sequence, TokensMissing())


def _begins_later(sequence: OpenSequence, chunk: TokenChunk) -> bool:
    """Whether the target has only tokens after those that it was asked for."""
    grant = sequence.grant
    return grant is not None and _of_grant(sequence, grant, chunk) and chunk.first_index > grant.tokens


def _continues(sequence: OpenSequence, chunk: TokenChunk) -> bool:
    """Whether the log is a prefix of what the target has."""
    grant = sequence.grant
    if grant is None or not _of_grant(sequence, grant, chunk):
        return False
    since, known = chunk.first_index, sequence.log[grant.tokens :]
    return since == grant.tokens and chunk.token_ids[: len(known)] == known


def _of_grant(sequence: OpenSequence, grant: EpochGrant, chunk: TokenChunk) -> bool:
    return (chunk.sequence, chunk.epoch) == (sequence.id, grant.epoch)


def proof_unanswered(state: IngressState, pending: PendingProof) -> None:
    """The target did not answer. While the source still has the sequence nothing is lost; else it is given up."""
    sequence = pending.sequence
    pending.grant.proof = ""
    state.metrics.resends.add("unproven")
    if sequence.phase is SequencePhase.VERIFYING:
        sequence.retry.excluded[pending.grant.instance.name] = pending.grant.incarnation
        state.fire(sequence, TargetLost())
