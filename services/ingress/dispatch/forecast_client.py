"""Forecast client: asks predictors for policies that want forecasts. It never makes a request fail.

What follows from each answer, and from none, is a table of the README ("Asking predictors"). Answers
that come after the deadline reach no actor; the runtime counts them (``late_reply``).
"""

from __future__ import annotations

from typing import Any

import msgspec
from millrace.actor.effects import Gather, Log
from millrace.contracts.observers import CandidateForecast
from millrace.contracts.predictor import LatencyPrediction, NoPrediction, PredictLatency
from millrace.policies.dispatch import DispatchView, QueryParameters

from services.ingress import tracing
from services.ingress.dispatch.candidates import load_ns
from services.ingress.dispatch.decision_publishing import expected_output_of
from services.ingress.lifecycle import ForecastsRequested
from services.ingress.pending import PendingForecast
from services.ingress.sequence import OpenSequence
from services.ingress.state import IngressState
from services.ingress.times import MILLISECOND_NS, SECOND_NS

#: A longer prediction is discarded: no request may take so long.
PREDICTED_MAX_NS = 3_600 * SECOND_NS
#: Forecasts listed per decision: the best, the chosen one among them. A broadcast asks hundreds.
FORECASTS_MAX = 16
_SILENT = "no answer in time"
_ANSWERS = (LatencyPrediction, NoPrediction)


class ForecastAnswers(msgspec.Struct, frozen=True):
    """Answers to one question.

    Attributes:
        predictions: By instance, those that can be true.
        notes: By instance, why there is no prediction; those asked who did not answer among them.
    """

    predictions: dict[str, CandidateForecast]
    notes: dict[str, str]


def predictors_paused(state: IngressState, model: str) -> bool:
    """Whether the predictors of a model are not asked now."""
    health = state.predictors.get(model)
    return health is not None and state.now_ns < health.from_ns


def ask_predictors(
    state: IngressState,
    sequences: list[OpenSequence],
    view: DispatchView,
    drawn: tuple[str, ...],
    parameters: QueryParameters,
) -> None:
    """Ask predictors of drawn instances, within the budget; the sequences are dispatched when all or none answered."""
    first = sequences[0]
    call = first.call
    budget = state.predictors[view.model].budget
    asked = budget.take(drawn, parameters.forecasts_per_s, state.now_ns, state.rng)
    if len(asked) < len(view.candidates):
        asked += _prefix_holder(state, first, view, asked)
    instances = state.cluster.instances
    pending = PendingForecast(
        sequences=sequences,
        asked=asked,
        placements=tuple([instances[name].placements for name in asked]),
        started_ns=state.now_ns,
        span=tracing.new_span(call, state.rng),
        pause_ns=int(parameters.pause_s * SECOND_NS),
    )
    correlation = state.correlation("forecast", pending)
    for sequence in sequences:
        state.fire(sequence, ForecastsRequested(correlation))
    timeout_ns = min(int(parameters.deadline_ms * MILLISECOND_NS), call.deadline_ns - state.now_ns)
    state.emit(
        Gather(
            subjects=tuple([state.subjects.predict(view.model, name) for name in asked]),
            body=_question(state, sequences, asked),
            correlation=correlation,
            timeout_ns=max(1, timeout_ns),
            answers_max=len(asked),
            request=call.request,
            traceparent=pending.span,
        )
    )


def _prefix_holder(
    state: IngressState, sequence: OpenSequence, view: DispatchView, drawn: tuple[str, ...]
) -> tuple[str, ...]:
    """The instance that was sent the longest prefix of the prompt last, where it was not drawn."""
    blocks = state.prompt_blocks(sequence)
    holder = state.holders.find(blocks, {c.name for c in view.candidates}) if blocks.hashes else ""
    return (holder,) if holder and holder not in drawn else ()


def _question(state: IngressState, sequences: list[OpenSequence], asked: tuple[str, ...]) -> PredictLatency:
    """One body for all of them: where several are asked, the subject names the instance."""
    first = sequences[0]
    blocks = state.prompt_blocks(first)
    return PredictLatency(
        request=first.call.request,
        instance=asked[0] if len(asked) == 1 else "",
        model=first.call.call.model,
        prompt_tokens=len(first.prompt),
        max_tokens=first.tokens_max,
        output_tokens=len(first.log),
        expected_output_tokens=expected_output_of(first),
        sequences=len(sequences),
        block_size=blocks.size,
        block_hashes=blocks.packed,
    )


def read_answers(state: IngressState, pending: PendingForecast, answers: list[tuple[str, Any]]) -> ForecastAnswers:
    """Read and count the answers, each instance asked once; pause after too many silences."""
    read = ForecastAnswers({}, {})
    since = dict(zip(pending.asked, pending.placements, strict=True))
    for _, body in answers:
        placements = since.pop(body.instance, None) if isinstance(body, _ANSWERS) else None
        result = "unexpected" if placements is None else _read(state, pending, read, body, placements)
        state.metrics.forecasts.add(result)
    for name in since:
        read.notes[name] = _SILENT
        state.metrics.forecasts.add("unanswered")
    _update_health(state, pending, answers, read)
    return read


def _read(
    state: IngressState,
    pending: PendingForecast,
    read: ForecastAnswers,
    body: LatencyPrediction | NoPrediction,
    placements: int,
) -> str:
    """Take one answer; returns the label it is counted under."""
    name = body.instance
    if isinstance(body, NoPrediction):
        read.notes[name] = body.reason.value
        return body.reason.value
    instance = state.cluster.instances[name]
    if body.incarnation < instance.member.incarnation:
        read.notes[name] = "of an earlier incarnation"
        return "outdated"
    wrong = absurdity(body)
    if wrong:
        read.notes[name] = f"absurd: {wrong}"
        return "absurd"
    first_ns = load_ns(state, pending.sequences[0].sampling.adapter, name)
    read.predictions[name] = CandidateForecast(
        name,
        body.ttft_ns + first_ns,
        body.e2e_ns + first_ns,
        body.tpot_mean_ns,
        body.preemptions,
        body.others_delay_ns,
        body.snapshot_age_ns,
        placed_since=instance.placements - placements,
        cached_tokens=body.cached_tokens,
        others=body.others,
    )
    return "answered"


def absurdity(body: LatencyPrediction) -> str:
    """Fault in a prediction's numbers; empty for none."""
    if body.ttft_ns < 0 or body.e2e_ns <= 0 or body.tpot_mean_ns < 0 or min(body.others, body.cached_tokens) < 0:
        return "a negative time or count"
    if body.ttft_ns > body.e2e_ns:
        return "a first token after the last"
    if max(body.e2e_ns, body.tpot_mean_ns, abs(body.others_delay_ns) // max(1, body.others)) > PREDICTED_MAX_NS:
        return "more than an hour"
    return ""


def _update_health(
    state: IngressState,
    pending: PendingForecast,
    answers: list[tuple[str, Any]],
    read: ForecastAnswers,
) -> None:
    """Count silences, pause after some, and log once when predictions go missing and once when they are back."""
    model = pending.sequences[0].call.call.model
    health = state.predictors[model]
    event = health.note(
        answered=bool(answers), useful=bool(read.predictions), now_ns=state.now_ns, pause_ns=pending.pause_ns
    )
    if event == "back":
        state.emit(Log(level="info", event="forecasts_back", fields={"model": model}))
    elif event:
        why = sorted(set(read.notes.values()))
        fields = {"model": model, "asked": len(pending.asked), "why": ", ".join(why[:3])}
        state.emit(Log(level="warning", event="forecasts_missing", fields=fields))
    absurd = [f"{name}: {note}" for name, note in read.notes.items() if note.startswith("absurd")]
    if absurd and not health.logged_absurd:
        health.logged_absurd = True
        state.emit(Log(level="warning", event="forecast_absurd", fields={"model": model, "answer": absurd[0]}))


def forecasts_of(pending: PendingForecast, answers: ForecastAnswers, chosen: str | None) -> list[CandidateForecast]:
    """Forecasts as published: the chosen instance's first, then the others by predicted end, then those without one."""
    predictions = answers.predictions
    order = sorted(predictions, key=lambda name: (name != chosen, predictions[name].e2e_ns))
    shown = [predictions[name] for name in order[:FORECASTS_MAX]]
    silent = [name for name in pending.asked if name not in predictions][: FORECASTS_MAX - len(shown)]
    return shown + [CandidateForecast(name, note=answers.notes[name]) for name in silent]
