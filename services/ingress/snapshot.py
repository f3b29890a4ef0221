"""What an ingress tells people and checkers about itself."""

from __future__ import annotations

from typing import Any

from services.ingress.pending import PendingForecast, PendingProof, PendingResend, PendingSubmit
from services.ingress.state import IngressState, OpenCall, OpenSequence, SequencePhase


def snapshot(state: IngressState) -> dict[str, Any]:
    """Who owns what, in which epoch, at which instance; made of plain types."""
    return {
        "name": state.name,
        "incarnation": state.incarnation,
        "connected": state.connected,
        "stopping": state.stopping,
        "calls": {request: _call(call) for request, call in state.calls.items()},
        "sequences": {name: _sequence(sequence) for name, sequence in state.sequences.items()},
        "waiting": list(state.waiting),
        "pending": len(state.pending),
        "unacknowledged": sum(map(len, state.acknowledge.values())),
        "instances": {
            i.name: {
                "incarnation": i.incarnation,
                "usable": i.usable,
                "why_not": i.why_not(),
                "heard_ns": i.heard_ns,
                "sequences": list(state.owned.get(i.name, ())),
                "in_flight_sequences": i.view.in_flight_sequences,
                "in_flight_tokens": i.view.in_flight_tokens,
            }
            for i in state.cluster.instances.values()
        },
        "plans": {model: plan.epoch for model, plan in state.cluster.plans.items()},
        "predictors": {
            model: {"silences": health.silences, "paused": state.now_ns < health.from_ns}
            for model, health in state.predictors.items()
        },
        "discarded": {kind: count for (kind,), count in state.metrics.discarded.counts.items()},
        "migrations": {how: count for (how,), count in state.metrics.migrations.counts.items()},
        "continuations": {why: count for (why,), count in state.metrics.continuations.counts.items()},
        "ended": {"/".join(labels): count for labels, count in state.metrics.calls.counts.items()},
    }


def _call(call: OpenCall) -> dict[str, Any]:
    return {
        "model": call.call.model,
        "accepted": call.accepted,
        "unended": call.unended,
        "arrival_ns": call.arrival_ns,
        "deadline_ns": call.deadline_ns,
        "output_tokens": call.output_tokens,
        "continuations": call.continuations,
        "migrations": call.migrations,
        "instances": list(call.instances),
    }


def _sequence(sequence: OpenSequence) -> dict[str, Any]:
    allotment = sequence.allotment
    return {
        "request": sequence.call.request,
        "phase": sequence.phase.value,
        "epoch": sequence.epoch,
        "instance": sequence.instance.name if sequence.instance is not None else "",
        "allotted": [] if allotment is None else [allotment.epoch, allotment.instance.name],
        "incarnation": sequence.incarnation,
        "log": list(sequence.log),
        "owned": sequence.owned,
        "why": sequence.why,
    }


def check_invariants(state: IngressState) -> None:
    """Raises AssertionError where the state contradicts itself."""
    state.cluster.check_invariants()
    assert len(state.calls) == state.admission.calls_open
    for name, sequence in state.sequences.items():
        assert sequence.id == name
        assert state.calls.get(sequence.call.request) is sequence.call
        _check_sequence(state, sequence)
    for call in state.calls.values():
        _check_call(state, call)
    for instance, owned in state.owned.items():
        assert owned, f"{instance} has an empty book"
        assert all(s.instance is state.cluster.instances[instance] for s in owned.values())
    for correlation, pending in state.pending.items():
        if isinstance(pending, PendingForecast):
            assert all(s.asking == correlation and s.phase is SequencePhase.ASKING for s in pending.sequences)
        elif isinstance(pending, PendingSubmit | PendingResend):
            assert pending.sequence.epoch == pending.epoch
            assert state.sequences.get(pending.sequence.id) is pending.sequence
        elif isinstance(pending, PendingProof):
            assert pending.allotment.proof == correlation
            assert pending.sequence.allotment is pending.allotment
            assert state.sequences.get(pending.sequence.id) is pending.sequence
    for target, allotted in state.allotted.items():
        assert allotted, f"{target} has an empty book of allotments"
        assert all(state.sequences.get(name) is sequence for name, sequence in allotted.items())


def _check_sequence(state: IngressState, sequence: OpenSequence) -> None:
    assert len(sequence.log) <= sequence.tokens_max
    assert sequence.epoch <= sequence.epoch_max
    _check_allotment(state, sequence)
    waiting = sequence.id in state.waiting
    owned = sequence.instance is not None and sequence.id in state.owned.get(sequence.instance.name, {})
    match sequence.phase:
        case SequencePhase.SUBMITTED:
            assert owned
            assert not waiting
            assert sequence.submit in state.pending
        case SequencePhase.RUNNING:
            assert owned
            assert not waiting
            assert sequence.owned
        case SequencePhase.PROVING:
            assert sequence.instance is None
            assert not waiting
            assert sequence.owned
            assert sequence.allotment is not None
            assert sequence.allotment.proof in state.pending
        case SequencePhase.WAITING:
            assert sequence.instance is None
            assert waiting or sequence.call.tagging in state.pending
            assert not sequence.submit
            assert not sequence.resend
            assert not sequence.asking
        case SequencePhase.ASKING:
            assert sequence.instance is None
            assert not waiting
            assert sequence.asking in state.pending
            assert not sequence.submit
            assert not sequence.resend
        case SequencePhase.ENDED:
            raise AssertionError(f"{sequence.id} has ended and is kept")


def _check_allotment(state: IngressState, sequence: OpenSequence) -> None:
    allotment = sequence.allotment
    if allotment is None:
        assert all(sequence.id not in book for book in state.allotted.values())
        return
    assert sequence.phase in (SequencePhase.RUNNING, SequencePhase.PROVING)
    assert sequence.epoch < allotment.epoch <= sequence.epoch_max
    assert allotment.instance is not allotment.source
    assert sequence.instance in (allotment.source, None)
    assert allotment.incarnation == allotment.instance.incarnation
    assert allotment.tokens <= len(sequence.log)
    assert state.allotted[allotment.instance.name][sequence.id] is sequence
    assert not allotment.proof or allotment.proof in state.pending


def _check_call(state: IngressState, call: OpenCall) -> None:
    live = [s for s in call.sequences if s.phase is not SequencePhase.ENDED]
    assert len(live) == call.unended > 0
    assert all(state.sequences.get(s.id) is s for s in live)
    assert call.output_tokens == sum(len(s.log) for s in call.sequences)
    assert call.accepted == (call.unaccepted == 0)
    assert not call.touched
    assert not call.settling
    assert call.accepted or call.unaccepted == sum(not s.owned for s in call.sequences)
