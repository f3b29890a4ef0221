"""Publication of each decision. Predictors learn from it what the next snapshot does not show yet."""

from __future__ import annotations

from millrace.actor.effects import Publish
from millrace.contracts.observers import DecisionMade

from services.ingress.lifecycle import DispatchChoice
from services.ingress.sequence import OpenSequence
from services.ingress.state import IngressState


def expected_output_of(sequence: OpenSequence) -> float | None:
    """Expected output tokens of a sequence for predictors: at most what it may have."""
    predicted = sequence.call.predicted
    return None if predicted is None else min(predicted, float(sequence.tokens_max))


def publish_decision(state: IngressState, sequences: list[OpenSequence], choice: DispatchChoice) -> None:
    """Publish a decision about sequences that were dispatched together."""
    first = sequences[0]
    call, why = first.call, first.retry.why
    decision = choice.decision
    # A policy that asks no predictor needs no block hashes.
    hashed = state.policy.ask is not None and decision.chosen
    blocks = state.prompt_blocks(first) if hashed else None
    if blocks is not None and decision.chosen:
        state.holders.note(blocks, decision.chosen)
    state.emit(
        Publish(
            subject=state.subjects.decision(call.call.model),
            body=DecisionMade(
                request=call.request,
                sequences=[s.id for s in sequences],
                epoch=first.epoch,
                kind="continuation" if first.owned else "dispatch",
                policy=choice.policy,
                model=call.call.model,
                chosen=decision.chosen or "",
                reason=f"{why}; {decision.reason}" if why else decision.reason,
                scores=decision.scores,
                at_ns=state.now_ns,
                wall_us=(state.now_ns - choice.asked_ns) / 1e3 if choice.asked_ns else 0.0,
                prompt_tokens=len(first.prompt),
                output_tokens=len(first.log),
                max_tokens=first.tokens_max,
                expected_output_tokens=expected_output_of(first),
                forecasts=choice.forecasts,
                fallback=choice.fallback,
                block_size=blocks.size if blocks is not None else 0,
                block_hashes=blocks.packed if blocks is not None else b"",
            ),
            request=call.request,
            traceparent=call.call.traceparent,
        )
    )
