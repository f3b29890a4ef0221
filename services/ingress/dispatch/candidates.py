"""Candidates of a dispatch: instances that may take a sequence, as the policy sees them."""

from __future__ import annotations

from millrace.contracts.observers import CandidateScore
from millrace.contracts.worker import Adapter
from millrace.policies.dispatch import DispatchView, InstanceView
from millrace.policies.dispatch.view import Prediction

from services.ingress.cluster.stage_routing import first_with_room
from services.ingress.dispatch.decision_publishing import expected_output_of
from services.ingress.dispatch.trial import prefer
from services.ingress.sequence import OpenSequence
from services.ingress.state import IngressState

#: Filtered instances listed in a decision besides the policy's own scores.
FILTERED_MAX = 8
#: Time in which an engine loads an adapter: 15 to 24 ms on a CPU for ranks 16 and 64 of an 8 M model. Not measured on a
#: GPU, nor for larger ones.
ADAPTER_LOAD_NS = 25_000_000
_NO_PREDICTIONS: dict[str, Prediction] = {}


def candidates_of(state: IngressState, sequence: OpenSequence) -> tuple[InstanceView, ...]:
    """Instances that may take a sequence, of the first stage that has any; a full stage spills to the next longer.

    Instances that failed this sequence are left out. They count again at once in a new incarnation, and after a pause
    when nothing else is there.
    """
    model = sequence.call.call.model
    excluded = sequence.retry.excluded
    lengths = state.cluster.lengths(model)
    needed = len(sequence.prompt) + sequence.sampling.room
    too_long_for_some = lengths is not None and needed > lengths[0]
    adapter = sequence.sampling.adapter
    only = state.cluster.only_stage(model)
    if only is not None and not excluded and not too_long_for_some and adapter is None:
        candidates = only.candidates()
        return prefer(state, sequence, candidates) if candidates else ()
    length = stage_length(state, sequence)
    stages = state.cluster.stages(model, length)
    for lenient in (False, True) if excluded else (False,):
        found = []
        for stage in stages:
            candidates = stage.candidates()
            if too_long_for_some:
                candidates = tuple(c for c in candidates if _long_enough(state, c.name, needed))
            if excluded:
                candidates = tuple(c for c in candidates if _allowed(state, sequence, c.name, lenient))
            if adapter is not None:
                candidates = _with_adapter(state, adapter, candidates)
            if candidates:
                found.append((stage, candidates))
        if found:
            chosen = found[0][1] if len(stages) == 1 else first_with_room(found, length)
            if preferred := prefer(state, sequence, chosen):
                return preferred
    return ()


def stage_length(state: IngressState, sequence: OpenSequence) -> int:
    """Length by which a sequence is given to a stage: the present one, or the one that it is expected to reach."""
    present = len(sequence.prompt) + len(sequence.log)
    expected = expected_output_of(sequence)
    if state.config.dispatch.stage_by == "present" or expected is None:
        return present
    return max(present, len(sequence.prompt) + round(expected))


def _long_enough(state: IngressState, name: str, length_tokens: int) -> bool:
    record = state.cluster.instances[name].member.record
    return record is None or record.max_model_len >= length_tokens


def _allowed(state: IngressState, sequence: OpenSequence, name: str, lenient: bool) -> bool:
    failed = sequence.retry.excluded.get(name)
    if failed is None:
        return True
    return lenient and (sequence.retry.rounds > 0 or state.cluster.instances[name].member.incarnation != failed)


def _with_adapter(
    state: IngressState, adapter: Adapter, candidates: tuple[InstanceView, ...]
) -> tuple[InstanceView, ...]:
    """Those that take adapters. For a policy that asks for no forecast, which would know what a load costs, those that
    have it, unless their batches are full.
    """
    able = tuple(c for c in candidates if _adapters_of(state, c.name) is not None)
    if state.policy.ask is not None:
        return able
    loaded = tuple(c for c in able if not load_ns(state, adapter, c.name))
    return loaded if any(not c.batch_full for c in loaded) else able


def load_ns(state: IngressState, adapter: Adapter | None, name: str) -> int:
    """Time that an instance first needs to load a sequence's adapter; 0 where it has it."""
    if adapter is None or any(
        (known.name, known.fingerprint) == (adapter.name, adapter.fingerprint)
        for known in _adapters_of(state, name) or ()
    ):
        return 0
    return ADAPTER_LOAD_NS


def _adapters_of(state: IngressState, name: str) -> list[Adapter] | None:
    record = state.cluster.instances[name].member.record
    return record.adapters if record is not None else None


def has_alternative(state: IngressState, sequence: OpenSequence) -> bool:
    """Whether another instance could take it: leaving a slow one for nothing would lose what it has computed."""
    length = len(sequence.prompt) + len(sequence.log)
    stages = state.cluster.stages(sequence.call.call.model, length)
    return any(i.usable and i is not sequence.instance for stage in stages for i in stage.instances)


def left_out(state: IngressState, sequence: OpenSequence) -> list[CandidateScore]:
    """Instances that are no candidates, with the reason; at most FILTERED_MAX."""
    stages = state.cluster.stages(sequence.call.call.model, len(sequence.prompt) + len(sequence.log))
    filtered = [score for stage in stages for score in stage.filtered()]
    filtered.extend(CandidateScore(name, 0.0, "failed this request") for name in sequence.retry.excluded)
    return filtered[:FILTERED_MAX]


def view_of(
    sequences: list[OpenSequence],
    candidates: tuple[InstanceView, ...],
    predictions: dict[str, Prediction] = _NO_PREDICTIONS,
) -> DispatchView:
    """A policy's view of sequences that are dispatched together."""
    first = sequences[0]
    return DispatchView(
        model=first.call.call.model,
        sequences=len(sequences),
        length_tokens=len(first.prompt) + len(first.log),
        candidates=candidates,
        expected_output_tokens=first.call.predicted,
        predictions=predictions,
    )
