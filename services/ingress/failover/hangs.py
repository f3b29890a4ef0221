"""Hung engines: a process that gives no sign of life while its worker goes on publishing summaries.

    age of the last sign        consequence
    hang_s                      no new sequence is dispatched there (``cluster/instances.py``); sequences that wait
                                  there for their first token fail over, but for suspects (``instance_loss.py``)
    hang_failover_s             its streams fail over
    it speaks again             it is used again; what it still decodes of moved sequences is stale

A sequence stays where no other instance could take it.
"""

from __future__ import annotations

from services.ingress.cluster.instances import KnownInstance
from services.ingress.dispatch.candidates import has_alternative
from services.ingress.failover.instance_loss import HOLD_NS, mark_suspects
from services.ingress.lifecycle import InstanceLost, LossCause, SequencePhase
from services.ingress.sequence import OpenSequence
from services.ingress.state import IngressState


def leave_hung_engines(state: IngressState) -> None:
    """Fail over sequences of hung engines. Called with each tick, and when a summary shows a hang."""
    for instance in state.cluster.hung():
        if instance.name in state.owned:
            _leave(state, instance)


def _leave(state: IngressState, instance: KnownInstance) -> None:
    silent_ns = instance.silent_ns(state.now_ns)
    if silent_ns:
        mark_suspects(state, instance, state.now_ns - silent_ns)
    for sequence in list(state.owned[instance.name].values()):
        if sequence.phase is SequencePhase.ENDED or sequence.instance is not instance:
            continue  # its call was given up by an earlier one
        limit_ns = state.times.hang_failover if _streams(sequence) else state.times.hang
        if sequence.retry.suspect:
            limit_ns = HOLD_NS
        if silent_ns >= limit_ns and has_alternative(state, sequence):
            state.fire(sequence, InstanceLost("instance_hung", LossCause.ENGINE_SILENT))


def _streams(sequence: OpenSequence) -> bool:
    """Whether its instance has decoded a token of it, or got it by a migration."""
    return sequence.phase is SequencePhase.RUNNING and (sequence.moved or not sequence.fresh)
