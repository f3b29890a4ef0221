"""Migration as ingress sees it: who owns a sequence that moves. Ingress alone has the token log, so ingress judges.

Until proven otherwise the source owns it. ``n`` is what the source had decoded when it was frozen.

    word                                             log                     verdict
    SequenceMoved(e', n) of the open allotment       <= n tokens             the target owns it; what is missing up to
                                                                               n, and later, it is asked for
                                                     > n tokens              the source thawed and went on: the target
                                                                               is told to stop
    tokens of e' (the word that it moved was lost)                           the target is asked for its tokens since
      or the source is lost                                                    the allotment
    its answer: the same tokens as the log's         no longer than they     the target owns it
    other ones, or fewer                                                     as if it had not moved
    TokensForgotten                                                          the same; where the target holds later
                                                                               tokens only, it is asked for those, or
                                                                               owns it if the log is not longer

So nothing of an allotted epoch is taken before its target is known to continue this very log, and the source's tokens
never after. Both may decode for a moment, in different epochs; a source that goes on is cancelled in its old one, as
any stray is.
"""

from __future__ import annotations

from typing import Any

from millrace.actor.effects import Effect, Log
from millrace.contracts.ingress import TokenChunk, TokensResent
from millrace.contracts.migration import SequenceMoved
from millrace.contracts.worker import TokensForgotten

from services.ingress import tracing
from services.ingress.calls.completion import detach
from services.ingress.failover.failover import ask_resend, lose_target
from services.ingress.migration.epoch_grants import allotted_to, ask_proof, close, void
from services.ingress.pending import PendingProof
from services.ingress.state import IngressState, OpenSequence, SequencePhase
from services.ingress.tokens.ingest import take_late
from services.ingress.tokens.stale import disown


def take_move(state: IngressState, body: SequenceMoved, out: list[Effect]) -> None:
    """A worker says that it has a sequence that moved."""
    sequence = state.sequences.get(body.sequence)
    instance = state.cluster.instances.get(body.instance)
    if sequence is None or instance is None or body.incarnation != instance.incarnation:
        _not_owner(state, sequence, body, out)
    elif sequence.instance is instance and sequence.epoch == body.epoch:
        if sequence.phase is SequencePhase.RUNNING and len(sequence.log) < body.first_index:
            ask_resend(state, sequence, out)
    elif not allotted_to(sequence, body.epoch, instance):
        _not_owner(state, sequence, body, out)
    elif len(sequence.log) <= body.first_index:
        switch(state, sequence, out)
        if len(sequence.log) < body.first_index:
            ask_resend(state, sequence, out)
    elif sequence.phase is SequencePhase.RUNNING:  # else the target's answer will tell whether its tokens are the log's
        void(state, sequence, "stayed", out)


def _not_owner(state: IngressState, sequence: OpenSequence | None, body: SequenceMoved, out: list[Effect]) -> None:
    """It ended, or this epoch is over or void; one that was never given out is not ours to end."""
    if sequence is None or (body.epoch != sequence.epoch and body.epoch <= sequence.epoch_max):
        disown(state, body.sequence, body.epoch, body.instance, out)


def switch(state: IngressState, sequence: OpenSequence, out: list[Effect]) -> None:
    """The target owns the sequence in the allotted epoch. The source's migrator has it let go; should that be lost, it
    thaws, and the first thing that it says has it cancelled there (strays.py).
    """
    source, call = sequence.instance, sequence.call
    outcome = "moved" if source is not None else "rescued"
    allotment = close(state, sequence, outcome)
    assert allotment is not None
    detach(state, sequence)
    target = allotment.instance
    sequence.phase = SequencePhase.RUNNING
    sequence.epoch, sequence.instance, sequence.incarnation = allotment.epoch, target, allotment.incarnation
    sequence.fresh = sequence.moved = True
    sequence.tries = sequence.rounds = sequence.waiting_since_ns = 0
    sequence.excluded = {}
    sequence.probe_after_ns = state.times.probe
    sequence.placed_ns = state.now_ns
    target.place(sequence.id, 0)  # its blocks are in the target's summaries already, and nothing is to be computed
    target.accept(sequence.id)
    state.owned.setdefault(target.name, {})[sequence.id] = sequence
    if sequence.blocks is not None:
        state.holders.note(sequence.blocks, target.name)
    call.migrations += 1
    if target.name not in call.instances:
        call.instances.append(target.name)
    left = source.name if source is not None else sequence.why
    sequence.why = ""
    tracing.end_move(sequence, allotment, source=left, outcome=outcome, now_ns=state.now_ns, out=out)
    fields = {"sequence": sequence.id, "from": left, "to": target.name, "tokens": len(sequence.log)}
    trace = call.call.traceparent
    out.append(Log(level="info", event="migration", fields=fields, request=call.request, traceparent=trace))


def take_proof(state: IngressState, pending: PendingProof, answer: Any, out: list[Effect]) -> None:
    """The target told what it has since the allotment: the owner if that is the log, and as far at least."""
    sequence: OpenSequence = pending.sequence
    pending.allotment.proof = ""  # still the sequence's: with an allotment its question is forgotten
    if not isinstance(answer, TokensResent):
        state.metrics.resends.add("forgotten")
        base = answer.base_index if isinstance(answer, TokensForgotten) else None
        if base is None or base <= pending.allotment.tokens or not state.connected:
            lose_target(state, sequence, out)
        else:
            _take_base(state, sequence, base, out)
    elif _continues(sequence, answer.chunk):
        state.metrics.resends.add("proven")
        switch(state, sequence, out)
        take_late(state, sequence, answer.chunk, out)
    elif sequence.phase is SequencePhase.PROVING:
        lose_target(state, sequence, out)
    else:
        void(state, sequence, "stayed", out)


def _take_base(state: IngressState, sequence: OpenSequence, base: int, out: list[Effect]) -> None:
    """The target holds its tokens from ``base`` on. It was given those before, and they are the source's."""
    assert sequence.allotment is not None
    if len(sequence.log) > base:
        sequence.allotment.tokens = base
        ask_proof(state, sequence, out)
        return
    switch(state, sequence, out)
    ask_resend(state, sequence, out)


def _continues(sequence: OpenSequence, chunk: TokenChunk) -> bool:
    """Whether the log is the beginning of what the target has."""
    allotment = sequence.allotment
    if allotment is None or (chunk.sequence, chunk.epoch) != (sequence.id, allotment.epoch):
        return False
    since, known = chunk.first_index, sequence.log[allotment.tokens :]
    return since == allotment.tokens and chunk.token_ids[: len(known)] == known


def proof_unanswered(state: IngressState, pending: PendingProof, out: list[Effect]) -> None:
    """The target did not answer. With a source that still has it nothing is lost; without one there is no waiting."""
    sequence: OpenSequence = pending.sequence
    pending.allotment.proof = ""
    state.metrics.resends.add("unproven")
    if sequence.phase is SequencePhase.PROVING:
        sequence.excluded[pending.allotment.instance.name] = pending.allotment.incarnation
        lose_target(state, sequence, out)
