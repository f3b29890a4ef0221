"""Trials: a sequence with which two engines died is dispatched alone (``failover/poison.py``)."""

from __future__ import annotations

from millrace.policies.dispatch import InstanceView

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
    other = state.on_trial
    busy = other is not None and other is not sequence and needs_trial(other) and other.phase not in _NOT_AWAY
    if not busy:
        state.on_trial = sequence
    return not busy


def idle_first(candidates: tuple[InstanceView, ...]) -> tuple[InstanceView, ...]:
    """The candidates that have no other work; all where none is idle."""
    idle = tuple(c for c in candidates if not (c.running or c.waiting or c.in_flight_sequences))
    return idle or candidates
