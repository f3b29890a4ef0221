"""Epochs: one counter per sequence, and which of them a migration's target may decode in.

Every submission and every allotment raises the counter, so that no two ever share an epoch. An allotment stays open
until its target is proven to have the sequence (moving.py), or it is void: replaced by a later one, the sequence ended
or was placed anew, the target is lost. Whoever decodes in a void epoch is told to stop.
"""

from __future__ import annotations

from millrace.actor.effects import Effect, Publish, Reply, Request
from millrace.contracts.migration import AllotEpoch, EpochAllotted, EpochRefused
from millrace.contracts.worker import CancelSequence, ResendTokens

from services.ingress import tracing
from services.ingress.cluster.instances import KnownInstance
from services.ingress.pending import PendingProof
from services.ingress.state import EpochGrant, IngressState, OpenSequence, SequencePhase

#: Migrations remembered as void per sequence. A late question of an older one voids the open allotment: no harm but
#: a recompute.
VOIDED_MAX = 4


def next_epoch(sequence: OpenSequence) -> int:
    """An epoch above all that were ever submitted or allotted."""
    sequence.epoch_max += 1
    return sequence.epoch_max


def allot(state: IngressState, body: AllotEpoch, reply_to: str, out: list[Effect]) -> None:
    """Answers a source's migrator. The same migration gets the same epoch again; another one makes it void."""
    if not reply_to:
        return
    sequence = state.sequences.get(body.sequence)
    detail = _refusal(state, body, sequence, out)
    if detail or sequence is None:
        state.metrics.migrations.add("refused")
        refused = EpochRefused(migration=body.migration, sequence=body.sequence, detail=detail)
        out.append(Reply(to=reply_to, body=refused))
        return
    allotment = sequence.allotment
    if allotment is None or not _same(allotment, body):
        void(state, sequence, "replaced", out)
        allotment = _open(state, sequence, body)
    answer = EpochAllotted(
        migration=body.migration, sequence=sequence.id, epoch=allotment.epoch, traceparent=allotment.span
    )
    out.append(Reply(to=reply_to, body=answer, request=sequence.call.request, traceparent=allotment.span))


def _refusal(state: IngressState, body: AllotEpoch, sequence: OpenSequence | None, out: list[Effect]) -> str:
    """Why no epoch is allotted; empty where one is."""
    if sequence is None:
        return "unknown here, or it has ended"
    allotment = sequence.allotment
    if allotment is not None and (allotment.epoch, allotment.instance.name) == (body.epoch, body.source):
        ask_proof(state, sequence, out)  # it says that it has it, sooner than its worker's word came
        return "an earlier migration of it is not settled yet"
    owner = sequence.instance
    there = owner is not None and (sequence.epoch, owner.name) == (body.epoch, body.source)
    if sequence.phase is not SequencePhase.RUNNING or not there:
        where = f"{sequence.phase.value} at {owner.name}" if owner is not None else sequence.phase.value
        return f"it is {where} in epoch {sequence.epoch}"
    target = state.cluster.instances.get(body.target)
    if target is None or target.dead or target.incarnation != body.incarnation:
        return f"no such target: {body.target} of incarnation {body.incarnation}"
    if target is owner:
        return "source and target are the same"
    return "this migration is void" if body.migration in sequence.voided else ""


def _same(allotment: EpochGrant, body: AllotEpoch) -> bool:
    asked = (body.migration, body.target, body.incarnation)
    return (allotment.migration, allotment.instance.name, allotment.incarnation) == asked


def _open(state: IngressState, sequence: OpenSequence, body: AllotEpoch) -> EpochGrant:
    target = state.cluster.instances[body.target]
    target.used = True
    span = tracing.new_span(sequence.call, state.rng)
    allotment = EpochGrant(
        sequence, target, migration=body.migration, epoch=next_epoch(sequence), now_ns=state.now_ns, span=span
    )
    sequence.allotment = allotment
    state.allotted.setdefault(body.target, {})[sequence.id] = sequence
    return allotment


def close(state: IngressState, sequence: OpenSequence, outcome: str) -> EpochGrant | None:
    """Takes the open allotment out of the books and counts what became of it."""
    allotment = sequence.allotment
    if allotment is None:
        return None
    sequence.allotment = None
    state.pending.pop(allotment.proof, None)
    book = state.allotted[allotment.instance.name]
    del book[sequence.id]
    if not book:
        del state.allotted[allotment.instance.name]
    state.metrics.migrations.add(outcome)
    return allotment


def void(state: IngressState, sequence: OpenSequence, outcome: str, out: list[Effect]) -> None:
    """The open allotment, if there is one, counts no more: its target drops what it has and takes nothing of it."""
    allotment = close(state, sequence, outcome)
    if allotment is None:
        return
    sequence.voided = (*sequence.voided[-VOIDED_MAX + 1 :], allotment.migration)
    out.append(
        Publish(
            subject=state.subjects.engine(allotment.instance.name, "cancel"),
            body=CancelSequence(sequence=sequence.id, epoch=allotment.epoch, reason=f"migration {outcome}"),
            request=sequence.call.request,
        )
    )


def allotted_to(sequence: OpenSequence, epoch: int, instance: KnownInstance) -> bool:
    """Whether the open allotment is of this epoch and to this instance, in its present incarnation."""
    allotment = sequence.allotment
    return (
        allotment is not None
        and epoch == allotment.epoch
        and instance is allotment.instance
        and instance.incarnation == allotment.incarnation
    )


def ask_proof(state: IngressState, sequence: OpenSequence, out: list[Effect]) -> None:
    """Asks the target for its tokens from the allotment on: where they agree with the log, it may own the sequence.

    A chunk by itself proves nothing: chunks before it may be lost, and the source may have gone on meanwhile with
    other tokens, as many.
    """
    allotment = sequence.allotment
    assert allotment is not None
    if allotment.proof or not state.connected:
        return
    allotment.proof = state.correlation("proof", PendingProof(sequence, allotment))
    out.append(
        Request(
            subject=state.subjects.engine(allotment.instance.name, "resend"),
            body=ResendTokens(sequence=sequence.id, epoch=allotment.epoch, from_index=allotment.tokens),
            correlation=allotment.proof,
            timeout_ns=state.times.resend_timeout,
            request=sequence.call.request,
        )
    )
