"""Epoch grants: which epoch a migration's target may decode in.

One counter per sequence: every submission and every grant raises it, so no two share an epoch. A grant is open until
its target is proven to hold the sequence (``ownership.py``), or until it is revoked: replaced by a later one, the
sequence ended or was dispatched anew, or the target is lost. An instance that decodes in a revoked epoch is told to
stop.
"""

from __future__ import annotations

from millrace.actor.effects import Reply, Request
from millrace.contracts.kv import KvRefusal
from millrace.contracts.leases import KvRefused
from millrace.contracts.migration import AllotEpoch, EpochAllotted
from millrace.contracts.worker import ResendTokens

from services.ingress import tracing
from services.ingress.cluster.instances import KnownInstance
from services.ingress.lifecycle import InstanceLost, SequencePhase
from services.ingress.pending import PendingProof
from services.ingress.sequence import EpochGrant, OpenSequence
from services.ingress.state import IngressState
from services.ingress.times import RESEND_TIMEOUT_NS

#: Revoked migrations remembered per sequence. A late question of an older one revokes the open grant, which costs a
#: recompute and no more.
REVOKED_MAX = 4


def grant_epoch(state: IngressState, body: AllotEpoch, reply_to: str) -> None:
    """Answer a source's migrator. The same migration gets the same epoch again; another one replaces it."""
    if not reply_to:
        return
    sequence = state.sequences.get(body.sequence)
    detail = _refusal(state, body, sequence)
    if detail or sequence is None:
        state.metrics.migrations.add("refused")
        refused = KvRefused(migration=body.migration, reason=KvRefusal.EPOCH_REFUSED, detail=detail)
        state.emit(Reply(to=reply_to, body=refused))
        return
    grant = sequence.grant
    if grant is None or not _same(grant, body):
        revoke(state, sequence, "replaced")
        grant = _open(state, sequence, body)
    answer = EpochAllotted(migration=body.migration, sequence=sequence.id, epoch=grant.epoch, traceparent=grant.span)
    state.emit(Reply(to=reply_to, body=answer, request=sequence.call.request, traceparent=grant.span))


def _refusal(state: IngressState, body: AllotEpoch, sequence: OpenSequence | None) -> str:
    """Reason for granting no epoch; empty where one is granted."""
    if sequence is None:
        return "unknown here, or it has ended"
    grant = sequence.grant
    if grant is not None and (grant.epoch, grant.instance.name) == (body.epoch, body.source):
        ask_proof(state, sequence)  # the target claims it before its worker's message has arrived
        return "an earlier migration of it is not settled yet"
    owner = sequence.instance
    there = owner is not None and (sequence.epoch, owner.name) == (body.epoch, body.source)
    if sequence.phase is not SequencePhase.RUNNING or not there:
        where = f"{sequence.phase.value} at {owner.name}" if owner is not None else sequence.phase.value
        return f"it is {where} in epoch {sequence.epoch}"
    target = state.cluster.instances.get(body.target)
    if target is None or target.dead or target.member.incarnation != body.incarnation:
        return f"no such target: {body.target} of incarnation {body.incarnation}"
    if target is owner:
        return "source and target are the same"
    return "this migration was revoked" if body.migration in sequence.revoked else ""


def _same(grant: EpochGrant, body: AllotEpoch) -> bool:
    asked = (body.migration, body.target, body.incarnation)
    return (grant.migration, grant.instance.name, grant.incarnation) == asked


def _open(state: IngressState, sequence: OpenSequence, body: AllotEpoch) -> EpochGrant:
    target = state.cluster.instances[body.target]
    target.used = True
    tracing.keep(sequence.call)
    assert sequence.instance is not None
    grant = sequence.grant = EpochGrant(
        migration=body.migration,
        epoch=sequence.next_epoch(),
        source=sequence.instance,
        instance=target,
        incarnation=target.member.incarnation,
        tokens=len(sequence.log),
        at_ns=state.now_ns,
        span=tracing.new_span(sequence.call, state.rng),
    )
    state.granted.setdefault(body.target, {})[sequence.id] = sequence
    return grant


def close(state: IngressState, sequence: OpenSequence, outcome: str) -> EpochGrant | None:
    """Take the open grant out of the tables and count its outcome; None where there is none."""
    grant = sequence.grant
    if grant is None:
        return None
    sequence.grant = None
    state.pending.pop(grant.proof, None)
    granted = state.granted[grant.instance.name]
    del granted[sequence.id]
    if not granted:
        del state.granted[grant.instance.name]
    state.metrics.migrations.add(outcome)
    return grant


def revoke(state: IngressState, sequence: OpenSequence, outcome: str) -> None:
    """Revoke the open grant, if there is one: its target drops the sequence, and its tokens are refused."""
    grant = close(state, sequence, outcome)
    if grant is None:
        return
    sequence.revoked = (*sequence.revoked[-REVOKED_MAX + 1 :], grant.migration)
    state.cancel(sequence.id, grant.epoch, grant.instance.name, f"migration {outcome}", sequence.call.request)


def granted_to(sequence: OpenSequence, epoch: int, instance: KnownInstance) -> bool:
    """Whether the open grant is of this epoch and to this instance, in its present incarnation."""
    grant = sequence.grant
    return (
        grant is not None
        and epoch == grant.epoch
        and instance is grant.instance
        and instance.member.incarnation == grant.incarnation
    )


def target_alive(state: IngressState, sequence: OpenSequence, event: InstanceLost) -> bool:
    """Whether the target of the open grant can be asked for the sequence."""
    grant = sequence.grant
    if grant is None or not state.connected:
        return False
    return not grant.instance.dead and grant.instance.member.incarnation == grant.incarnation


def ask_proof(state: IngressState, sequence: OpenSequence) -> None:
    """Ask the target for its tokens since the grant: where they agree with the log, it may own the sequence.

    A chunk by itself proves nothing: chunks before it may be lost, and the source may have decoded as many other
    tokens meanwhile.
    """
    grant = sequence.grant
    assert grant is not None
    if grant.proof or not state.connected:
        return
    grant.proof = state.correlation("proof", PendingProof(sequence, grant))
    state.emit(
        Request(
            subject=state.subjects.engine(grant.instance.name, "resend"),
            body=ResendTokens(sequence=sequence.id, epoch=grant.epoch, from_index=grant.tokens),
            correlation=grant.proof,
            timeout_ns=RESEND_TIMEOUT_NS,
            request=sequence.call.request,
        )
    )
