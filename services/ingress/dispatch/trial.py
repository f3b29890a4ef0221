"""Trials: a sequence with which two engines died is dispatched alone (``failover/poison.py``).

One trial at a time per ingress, on an idle instance where there is one; while it lasts, other sequences avoid that
instance unless there is no other.
"""

from __future__ import annotations

from millrace.policies.dispatch import InstanceView

from services.ingress.cluster.instances import KnownInstance
from services.ingress.lifecycle import SequencePhase
from services.ingress.sequence import OpenSequence
from services.ingress.state import IngressState

#: Deaths of engines in a row without a new token after which a sequence is tried alone.
DEATHS_BEFORE_TRIAL = 2
_NOT_AWAY = (SequencePhase.WAITING, SequencePhase.ENDED)


def needs_trial(sequence: OpenSequence) -> bool:
    """Whether a sequence may only be dispatched alone."""
    return sequence.retry.deaths >= DEATHS_BEFORE_TRIAL


def begin_trial(state: IngressState, sequence: OpenSequence) -> bool:
    """Start a trial, or return False while another one is under way."""
    other = _on_trial(state)
    if other is not None and other is not sequence:
        return False
    state.on_trial = sequence
    return True


def prefer(
    state: IngressState, sequence: OpenSequence, candidates: tuple[InstanceView, ...]
) -> tuple[InstanceView, ...]:
    """Candidates by which a trial stays alone: idle ones for it, other instances for the others; all where none is."""
    if needs_trial(sequence):
        return tuple(c for c in candidates if _idle(c)) or candidates
    other = _on_trial(state)
    if other is None or other.instance is None:
        return candidates
    home = other.instance.name
    return tuple(c for c in candidates if c.name != home) or candidates


def note_submission(state: IngressState, sequence: OpenSequence, instance: KnownInstance) -> None:
    """Note, before a sequence is submitted to an instance, which trial is alone there."""
    sequence.retry.alone = needs_trial(sequence) and _idle(instance.view)
    other = _on_trial(state)
    if other is not None and other is not sequence and other.instance is instance:
        other.retry.alone = False


def _on_trial(state: IngressState) -> OpenSequence | None:
    """The sequence whose trial is under way; a new token ends a trial."""
    sequence = state.on_trial
    if sequence is None:
        return None
    if sequence.phase in _NOT_AWAY or not needs_trial(sequence):
        state.on_trial = None
        return None
    return sequence


def _idle(view: InstanceView) -> bool:
    return not (view.running or view.waiting or view.in_flight_sequences)
