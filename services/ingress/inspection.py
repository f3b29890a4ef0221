"""Snapshot of an ingress for people, and its invariants for checkers."""

from __future__ import annotations

from typing import Any

import msgspec
from millrace.contracts.ingress import TokensGenerated
from millrace.contracts.message import Body
from millrace.contracts.status import InstanceSummary

from services.ingress.calls.open_call import OpenCall
from services.ingress.cascade.lifecycle import CascadePhase
from services.ingress.cascade.open_cascade import OpenCascade
from services.ingress.lifecycle import SequencePhase
from services.ingress.pending import PendingForecast, PendingProof, PendingResend, PendingSubmit
from services.ingress.sequence import OpenSequence
from services.ingress.state import IngressState


def snapshot(state: IngressState) -> dict[str, Any]:
    """Owner, epoch and instance of each sequence; made of plain types."""
    return {
        "name": state.name,
        "incarnation": state.incarnation,
        "connected": state.connected,
        "stopping": state.stopping,
        "calls_open": state.admission.calls_open,
        "calls": {request: _call(call) for request, call in state.calls.items()},
        "cascades": {request: _cascade(parent) for request, parent in state.parents.items()},
        "cascade_plans": {name: served.plan.epoch for name, served in state.cascades.served.items()},
        "sequences": {name: _sequence(sequence) for name, sequence in state.sequences.items()},
        "waiting": list(state.waiting),
        "pending": len(state.pending),
        "unacknowledged": sum(map(len, state.acknowledge.values())),
        "instances": {
            i.name: {
                "incarnation": i.member.incarnation,
                "usable": i.usable,
                "why_not": i.why_not(),
                "heard_ns": i.member.heard_ns,
                "sequences": list(state.owned.get(i.name, ())),
                "in_flight_sequences": i.view.in_flight_sequences,
                "in_flight_tokens": i.view.in_flight_tokens,
            }
            for i in state.cluster.instances.values()
        },
        "plans": {model: plan.epoch for model, plan in state.cluster.plans.items()},
        "predictors": {
            model: {"silences": health.failures, "paused": state.now_ns < health.from_ns}
            for model, health in state.predictors.items()
        },
        "discarded": state.metrics.discarded.plain(),
        "migrations": state.metrics.migrations.plain(),
        "continuations": state.metrics.continuations.plain(),
        "ended": state.metrics.calls.plain(),
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


def _cascade(parent: OpenCascade) -> dict[str, Any]:
    return {
        "model": parent.call.model,
        "phase": parent.phase.value,
        "arrival_ns": parent.arrival_ns,
        "deadline_ns": parent.deadline_ns,
        "attempts": [msgspec.structs.asdict(attempt.told()) for attempt in parent.attempts],
    }


def _sequence(sequence: OpenSequence) -> dict[str, Any]:
    grant = sequence.grant
    return {
        "request": sequence.call.request,
        "phase": sequence.phase.value,
        "epoch": sequence.epoch,
        "instance": sequence.instance.name if sequence.instance is not None else "",
        "granted": [] if grant is None else [grant.epoch, grant.instance.name],
        "incarnation": sequence.incarnation,
        "log": list(sequence.log),
        "owned": sequence.owned,
        "why": sequence.retry.why,
    }


def check_invariants(state: IngressState) -> None:
    """Raises AssertionError where the state contradicts itself."""
    state.cluster.check_invariants()
    own = [call for call in state.calls.values() if call.listener.is_client]
    assert len(own) + len(state.parents) == state.admission.calls_open
    assert not state.unsettled
    for parent in state.parents.values():
        _check_parent(state, parent)
    for name, sequence in state.sequences.items():
        assert sequence.id == name
        assert state.calls.get(sequence.call.request) is sequence.call
        _check_sequence(state, sequence)
    for call in state.calls.values():
        _check_call(state, call)
    for instance, owned in state.owned.items():
        assert owned, f"{instance} has an empty book"
        known = state.cluster.instances[instance]
        for sequence in owned.values():
            assert sequence.instance is known
    for correlation, pending in state.pending.items():
        if isinstance(pending, PendingForecast):
            assert all(s.asking == correlation and s.phase is SequencePhase.FORECASTING for s in pending.sequences)
        elif isinstance(pending, PendingSubmit | PendingResend):
            assert pending.sequence.epoch == pending.epoch
            assert state.sequences.get(pending.sequence.id) is pending.sequence
        elif isinstance(pending, PendingProof):
            assert pending.grant.proof == correlation
            assert pending.sequence.grant is pending.grant
            assert state.sequences.get(pending.sequence.id) is pending.sequence
    for target, granted in state.granted.items():
        assert granted, f"{target} has an empty table of grants"
        assert all(state.sequences.get(name) is sequence for name, sequence in granted.items())


def check_touched(state: IngressState, body: Body) -> None:
    """Check what the message just handled may have changed.

    A summary changes its instance; tokens change the sequences that they name, and their calls. After any other
    message, and where a named sequence has ended, all is checked.

    Raises:
        AssertionError: the state contradicts itself.
    """
    if isinstance(body, InstanceSummary):
        state.cluster.check_instance(body.instance)
        assert not state.unsettled
        return
    named = [state.sequences.get(chunk.sequence) for chunk in body.chunks] if isinstance(body, TokensGenerated) else []
    present = [sequence for sequence in named if sequence is not None]
    if not present or len(present) < len(named):
        check_invariants(state)
        return
    assert not state.unsettled
    for sequence in present:
        assert state.sequences[sequence.id] is sequence
        _check_sequence(state, sequence)
    for call in {id(sequence.call): sequence.call for sequence in present}.values():
        assert state.calls.get(call.call.request) is call
        _check_call(state, call)


def _check_parent(state: IngressState, parent: OpenCascade) -> None:
    tiers = [attempt.tier for attempt in parent.attempts if not attempt.again]
    assert tiers == sorted(set(tiers)), f"{parent.request}: tiers {tiers} do not rise"
    early = [attempt.model for attempt in parent.attempts if attempt.outcome == "rejected_early"]
    again = [attempt.model for attempt in parent.attempts if attempt.again]
    assert set(again) <= set(early), f"{parent.request}: {again} ran again, {early} were rejected early"
    assert len(again) == len(set(again)), f"{parent.request}: {again} ran again more than once"
    assert not parent.events
    open_attempts = [attempt for attempt in parent.attempts if attempt.request in state.calls]
    if parent.phase is CascadePhase.JUDGING:
        assert not open_attempts
        assert parent.asking in state.pending, f"{parent.request}: its judge is asked while it is judged"
    else:
        assert parent.phase is not CascadePhase.ENDED
        assert open_attempts == [parent.attempt]
        assert not parent.asking


def _check_sequence(state: IngressState, sequence: OpenSequence) -> None:
    assert len(sequence.log) <= sequence.tokens_max
    assert sequence.epoch <= sequence.epoch_max
    _check_grant(state, sequence)
    waiting = sequence.id in state.waiting
    instance, phase = sequence.instance, sequence.phase
    owned = instance is not None and sequence.id in state.owned.get(instance.name, ())
    match phase:
        case SequencePhase.RUNNING:  # most are
            assert owned
            assert not waiting
            assert sequence.owned
        case SequencePhase.SUBMITTED:
            assert owned
            assert not waiting
            assert sequence.submit in state.pending
        case SequencePhase.VERIFYING:
            assert sequence.instance is None
            assert not waiting
            assert sequence.owned
            assert sequence.grant is not None
            assert sequence.grant.proof in state.pending
        case SequencePhase.WAITING:
            assert sequence.instance is None
            assert waiting or sequence.call.tagging in state.pending
            assert not sequence.submit
            assert not sequence.resend.correlation
            assert not sequence.asking
        case SequencePhase.FORECASTING:
            assert sequence.instance is None
            assert not waiting
            assert sequence.asking in state.pending
            assert not sequence.submit
            assert not sequence.resend.correlation
        case SequencePhase.ENDED:
            raise AssertionError(f"{sequence.id} has ended and is kept")


def _check_grant(state: IngressState, sequence: OpenSequence) -> None:
    grant = sequence.grant
    if grant is None:
        for book in state.granted.values():
            assert sequence.id not in book
        return
    assert sequence.phase in (SequencePhase.RUNNING, SequencePhase.VERIFYING)
    assert sequence.epoch < grant.epoch <= sequence.epoch_max
    assert grant.instance is not grant.source
    assert sequence.instance in (grant.source, None)
    assert grant.incarnation == grant.instance.member.incarnation
    assert grant.tokens <= len(sequence.log)
    assert state.granted[grant.instance.name][sequence.id] is sequence
    assert not grant.proof or grant.proof in state.pending


def _check_call(state: IngressState, call: OpenCall) -> None:
    live = tokens = unowned = 0  # one loop: with a generator for each this was a tenth of a soak
    for sequence in call.sequences:
        tokens += len(sequence.log)
        unowned += not sequence.owned
        if sequence.phase is not SequencePhase.ENDED:
            live += 1
            assert state.sequences.get(sequence.id) is sequence
    assert live == call.unended > 0
    assert call.output_tokens == tokens
    assert call.accepted == (call.unaccepted == 0)
    assert call.accepted or call.unaccepted == unowned
