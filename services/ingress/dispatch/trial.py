"""Trials: a suspect, and a sequence with which two engines died, is dispatched alone (``failover/poison.py``).

One trial at a time per ingress, on an idle instance, or on one that has only what passed its trial there. While
suspects wait, other sequences leave one such instance to them, unless there is no other: an engine that comes back
under load takes all suspects of its death one after the other. A suspect waits for that, and is refused where it waits
too long. Where the whole process of
its worker ended, which a kill from outside does and an engine's crash does not, it is a suspect for
``PROCESS_WAIT_NS`` only: else a cluster without an idle instance would refuse what it lost so. A stream that lost two
engines takes any instance if none is idle, and waits for another's trial for a second only: where engines die for other
reasons, such streams are many and must not queue.
"""

from __future__ import annotations

from millrace.policies.dispatch import InstanceView

from services.ingress.cluster.instances import KnownInstance
from services.ingress.lifecycle import SequencePhase
from services.ingress.sequence import OpenSequence
from services.ingress.state import IngressState
from services.ingress.times import SECOND_NS

#: Deaths of engines in a row without a new token after which a sequence is tried alone.
DEATHS_BEFORE_TRIAL = 2
#: Longest wait for another sequence's trial.
WAIT_NS = 1 * SECOND_NS
#: How long a sequence stays a suspect whose worker's process ended.
PROCESS_WAIT_NS = 4 * SECOND_NS
#: Reasons for which a sequence left an instance whose process ended.
PROCESS_ENDED = ("instance_dead", "instance_restarted")
#: Suspects that wait are dispatched again within this.
DUE_NS = 2 * SECOND_NS
_NOT_AWAY = (SequencePhase.WAITING, SequencePhase.ENDED)


def needs_trial(sequence: OpenSequence) -> bool:
    """Whether a sequence may only be dispatched alone."""
    return sequence.retry.suspect or sequence.retry.deaths >= DEATHS_BEFORE_TRIAL


def must_wait(state: IngressState, sequence: OpenSequence) -> bool:
    """Whether a sequence has to wait for another's trial; where it has not, its own begins."""
    retry = sequence.retry
    if retry.suspect and retry.why in PROCESS_ENDED and state.now_ns - retry.since_ns >= PROCESS_WAIT_NS:
        retry.suspect = False
    if not needs_trial(sequence):
        return False
    if _on_trial(state) is None:  # its own is over while it waits
        state.on_trial = sequence
        return False
    _note_waiting(state, sequence)
    return sequence.retry.suspect or state.now_ns - sequence.retry.since_ns < WAIT_NS


def prefer(
    state: IngressState, sequence: OpenSequence, candidates: tuple[InstanceView, ...]
) -> tuple[InstanceView, ...]:
    """Candidates by which a trial stays alone: idle ones for it, other instances for the others."""
    if state.on_trial is sequence:
        quiet = tuple(c for c in candidates if _is_quiet(state, c))
        if not quiet:
            _note_waiting(state, sequence)
        return quiet if sequence.retry.suspect else quiet or candidates
    other = _on_trial(state)
    if other is not None and other.instance is not None and other.retry.alone:
        home = other.instance.name
    elif state.trials_due_ns.get(sequence.call.call.model, 0) > state.now_ns:
        home = next((c.name for c in candidates if _is_quiet(state, c)), "")
    else:
        return candidates
    return tuple(c for c in candidates if c.name != home) or candidates


def note_submission(state: IngressState, sequence: OpenSequence, instance: KnownInstance) -> None:
    """Note, before a sequence is submitted to an instance, which trial is alone there."""
    other = _on_trial(state)
    sequence.retry.alone = sequence.retry.tried = other is sequence and _is_quiet(state, instance.view)
    if other is not None and other is not sequence and other.instance is instance:
        other.retry.alone = False  # it may wait behind them for minutes: others' trials do not wait with it
        state.on_trial = None


def _on_trial(state: IngressState) -> OpenSequence | None:
    """The sequence whose trial is under way; a new token ends a trial."""
    sequence = state.on_trial
    if sequence is None:
        return None
    if sequence.phase in _NOT_AWAY or not needs_trial(sequence):
        state.on_trial = None
        return None
    return sequence


def _note_waiting(state: IngressState, sequence: OpenSequence) -> None:
    if sequence.retry.suspect:
        state.trials_due_ns[sequence.call.call.model] = state.now_ns + DUE_NS


def _is_quiet(state: IngressState, view: InstanceView) -> bool:
    """Whether an instance has nothing but sequences that passed their trial there."""
    passed = sum(1 for s in state.owned.get(view.name, {}).values() if s.retry.tried and not needs_trial(s))
    return view.running + view.waiting + view.in_flight_sequences <= passed
