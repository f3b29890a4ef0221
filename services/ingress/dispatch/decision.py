"""Deciding who gets sequences: who may take them, what the policy says of them, and what the bus is told of it."""

from __future__ import annotations

from typing import Any

import msgspec
from millrace.actor.effects import Effect, Publish
from millrace.contracts.observers import CandidateScore, DecisionMade, Forecast
from millrace.policies.dispatch import DISPATCH_POLICIES, Decision, DispatchPolicy, DispatchView, InstanceView
from millrace.policies.dispatch.view import Prediction

from services.ingress.dispatch.prefix_blocks import blocks_of
from services.ingress.state import IngressState, OpenSequence

#: Scores of filtered instances told in a decision besides the policy's own.
FILTERED_MAX = 8
#: Forecasts told per decision: the best, the chosen one among them. A broadcast asks hundreds.
FORECASTS_MAX = 16
_NO_PREDICTIONS: dict[str, Prediction] = {}


class DispatchDecision(msgspec.Struct, frozen=True, kw_only=True):
    """A decision with what led to it.

    Attributes:
        policy: Name of the policy that the call has.
        fallback: Name of the policy that decided in its place; empty for none.
        forecasts: What was predicted, the chosen one first, at most FORECASTS_MAX.
        asked_ns: When the predictors were asked, unix ns; 0 where nobody was.
    """

    decision: Decision
    policy: str
    fallback: str = ""
    forecasts: list[Forecast] = []
    asked_ns: int = 0

    @property
    def forecast(self) -> Forecast | None:
        """Of the chosen instance; None where there is none."""
        first = self.forecasts[0] if self.forecasts else None
        return first if first is not None and first.name == self.decision.chosen and not first.note else None


def candidates_of(state: IngressState, sequence: OpenSequence) -> tuple[InstanceView, ...]:
    """Who may take a sequence, of the first stage that has anyone.

    Instances that failed this sequence are left out; after a pause they count again when nothing else is there,
    and at once when they are a new incarnation.
    """
    model = sequence.call.call.model
    lengths = state.cluster.lengths(model)
    needed = len(sequence.prompt) + sequence.tokens_max
    too_long_for_some = lengths is not None and needed > lengths[0]
    stages = state.cluster.stages(model, len(sequence.prompt) + len(sequence.log))
    for lenient in (False, True) if sequence.excluded else (False,):
        for stage in stages:
            candidates = stage.candidates()
            if too_long_for_some:
                candidates = tuple(c for c in candidates if _long_enough(state, c.name, needed))
            if sequence.excluded:
                candidates = tuple(c for c in candidates if _allowed(state, sequence, c.name, lenient))
            if candidates:
                return candidates
    return ()


def _long_enough(state: IngressState, name: str, length_tokens: int) -> bool:
    record = state.cluster.instances[name].record
    return record is None or record.max_model_len >= length_tokens


def _allowed(state: IngressState, sequence: OpenSequence, name: str, lenient: bool) -> bool:
    failed = sequence.excluded.get(name)
    if failed is None:
        return True
    return lenient and (sequence.rounds > 0 or state.cluster.instances[name].incarnation != failed)


def nobody(state: IngressState, sequence: OpenSequence, policy: str) -> DispatchDecision:
    """There are no candidates: who is left out, and why."""
    stages = state.cluster.stages(sequence.call.call.model, len(sequence.prompt) + len(sequence.log))
    filtered = [score for stage in stages for score in stage.filtered()]
    filtered.extend(CandidateScore(name, 0.0, "failed this request") for name in sequence.excluded)
    return DispatchDecision(decision=Decision(None, "no instance can take it", filtered[:FILTERED_MAX]), policy=policy)


def view_of(
    sequences: list[OpenSequence],
    candidates: tuple[InstanceView, ...],
    predictions: dict[str, Prediction] = _NO_PREDICTIONS,
) -> DispatchView:
    """What a policy sees of sequences that are placed together."""
    first = sequences[0]
    return DispatchView(
        model=first.call.call.model,
        sequences=len(sequences),
        length_tokens=len(first.prompt) + len(first.log),
        candidates=candidates,
        expected_output_tokens=first.call.predicted,
        predictions=predictions,
    )


def decide(state: IngressState, policy: DispatchPolicy, parameters: Any, view: DispatchView) -> Decision:
    """Has a policy decide, and keeps its next state."""
    key = (policy.name, view.model)
    before = state.policy_states.get(key, policy.initial_state)
    decision, state.policy_states[key] = policy.decide(view, parameters, before, state.now_ns, state.rng)
    return decision


def decide_instead(
    state: IngressState, fallback: str, view: DispatchView, *, why: str, reason: str
) -> tuple[Decision, str]:
    """Has the fallback decide where there are no predictions; the decision and the fallback's name.

    Args:
        why: Label of the metric.
        reason: Begins the decision's sentence.
    """
    policy = DISPATCH_POLICIES[fallback]
    decision = decide(state, policy, policy.parameters(), view)
    state.metrics.fallbacks.add(why)
    return Decision(decision.chosen, f"{reason}; {fallback}: {decision.reason}", decision.scores), fallback


def expected_of(sequence: OpenSequence) -> float | None:
    """Expected output of a sequence for those who forecast: never more than it may have."""
    predicted = sequence.call.predicted
    return None if predicted is None else min(predicted, float(sequence.tokens_max))


def publish_decision(
    state: IngressState, sequences: list[OpenSequence], dispatch: DispatchDecision, out: list[Effect]
) -> None:
    """Tells the bus. Predictors learn from it what the next snapshot does not show yet, so each placement is told."""
    first = sequences[0]
    call = first.call
    decision = dispatch.decision
    # Where nobody is asked, nobody wants to know what lies where.
    blocks = blocks_of(state, first) if state.policy_of(call)[0].ask is not None and decision.chosen else None
    if blocks is not None and decision.chosen:
        state.holders.note(blocks, decision.chosen)
    out.append(
        Publish(
            subject=state.subjects.decision(call.call.model),
            body=DecisionMade(
                request=call.request,
                sequences=[s.id for s in sequences],
                epoch=first.epoch,
                kind="continuation" if first.owned else "dispatch",
                policy=dispatch.policy,
                model=call.call.model,
                chosen=decision.chosen or "",
                reason=f"{first.why}; {decision.reason}" if first.why else decision.reason,
                scores=decision.scores,
                at_ns=state.now_ns,
                wall_us=(state.now_ns - dispatch.asked_ns) / 1e3 if dispatch.asked_ns else 0.0,
                prompt_tokens=len(first.prompt),
                output_tokens=len(first.log),
                max_tokens=first.tokens_max,
                expected_output_tokens=expected_of(first),
                forecasts=dispatch.forecasts,
                fallback=dispatch.fallback,
                block_size=blocks.size if blocks is not None else 0,
                block_hashes=blocks.packed if blocks is not None else b"",
            ),
            request=call.request,
            traceparent=call.call.traceparent,
        )
    )
