"""KV replicas of open sequences: who holds one, and continuations that begin on it.

    event                                          consequence
    KvReplicated of the present epoch              known
    its instance is lost                           the holder is chosen, before any policy, if it may take the sequence
    the sequence is submitted                      the holder is told which replica; elsewhere the replica is freed
    it migrates, or ends                           the replica is freed

What is known here is a hint: the holder's worker decides what of the replica is still there, and computes the rest.
"""

from __future__ import annotations

from millrace.actor.effects import Log
from millrace.contracts.migration import KvReplicated
from millrace.policies.dispatch import Decision, InstanceView

from services.ingress.cluster.instances import KnownInstance
from services.ingress.dispatch.trial import needs_trial
from services.ingress.lifecycle import DispatchChoice
from services.ingress.sequence import OpenSequence
from services.ingress.state import IngressState

#: Stands for the policy in decisions.
POLICY = "kv_replica"


def take_replica(state: IngressState, body: KvReplicated) -> None:
    """Note a replica, or that there is none any more. One of another epoch is of no use."""
    sequence = state.sequences.get(body.sequence)
    if sequence is None:
        _free(state, body, "")
        return
    known = sequence.replica
    if not body.tokens:
        if known is not None and known.replica == body.replica:
            sequence.replica = None
    elif sequence.epoch == body.epoch:
        if known is not None and known.replica != body.replica:
            free_replica(state, sequence)
        sequence.replica = body
    elif known is None or known.replica != body.replica:
        _free(state, body, sequence.call.request)


def choice_of(
    state: IngressState, sequence: OpenSequence, candidates: tuple[InstanceView, ...]
) -> DispatchChoice | None:
    """The choice of the instance that holds a replica; None where there is none, or it may not take the sequence."""
    replica = sequence.replica
    if replica is None or needs_trial(sequence) or not any(c.name == replica.instance for c in candidates):
        return None
    if not _holds(state.cluster.instances[replica.instance], replica):
        return None
    length = len(sequence.prompt) + len(sequence.log)
    reason = f"it holds the KV of {min(replica.tokens, length)} of {length} tokens"
    return DispatchChoice(decision=Decision(replica.instance, reason, []), policy=POLICY)


def _holds(instance: KnownInstance, replica: KvReplicated) -> bool:
    return (instance.name, instance.member.incarnation) == (replica.instance, replica.incarnation)


def use_replica(state: IngressState, sequence: OpenSequence, instance: KnownInstance) -> str:
    """Name of the replica that a submission to this instance begins on; empty for none. It is known no longer: what
    the sequence decodes from here on may differ from what its source decoded.
    """
    replica = sequence.replica
    if replica is None:
        return ""
    if not _holds(instance, replica):
        free_replica(state, sequence)
        return ""
    sequence.replica = None
    return replica.replica


def note_resumed(state: IngressState, sequence: OpenSequence, kv_tokens: int) -> None:
    """Count and tell how many tokens of a continuation had their KV at the holder."""
    assert sequence.instance is not None
    if sequence.span.attributes is not None:
        sequence.span.attributes["kv_tokens"] = kv_tokens
    length = len(sequence.prompt) + len(sequence.log)
    state.metrics.replica_continuations += 1
    state.metrics.replica_tokens += kv_tokens
    state.metrics.replica_tail_tokens += length - kv_tokens
    fields = {"sequence": sequence.id, "to": sequence.instance.name, "kv_tokens": kv_tokens, "tokens": length}
    trace = sequence.call.call.traceparent
    state.emit(
        Log(level="info", event="continued_on_replica", fields=fields, request=sequence.call.request, traceparent=trace)
    )


def free_replica(state: IngressState, sequence: OpenSequence) -> None:
    """Tell the holder that the replica is of no use any more."""
    replica, sequence.replica = sequence.replica, None
    if replica is not None:
        _free(state, replica, sequence.call.request)


def _free(state: IngressState, replica: KvReplicated, request: str) -> None:
    """By a cancel up to its epoch: the holder may by now have the sequence itself, in a later one."""
    state.cancel(replica.sequence, replica.epoch, replica.instance, "its replica is of no use", request)
