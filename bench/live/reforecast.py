"""Predictions of this code's predictor at each placement of a recorded run, whichever policy placed it.

The actor hears the recorded snapshots, decisions and outcomes at their times and is asked about each request just
before it hears of its placement. So a change of the predictor is judged on the same run in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import merge

import msgspec
from millrace.actor.config import BusConfig
from millrace.actor.effects import Reply
from millrace.contracts.local import KeyChanged
from millrace.contracts.message import Body, Message
from millrace.contracts.observers import DecisionMade, RequestFinished
from millrace.contracts.predictor import LatencyPrediction, PredictLatency
from millrace.contracts.subjects import subject_token
from millrace.enginemodel.registered import load_step_times

from bench.live.recording import Figures, Recording, figures
from services.predictor.actor import PredictorActor
from services.predictor.config import PredictorConfig
from services.predictor.metrics import PredictorMetrics


def reforecast(recordings: Sequence[Recording], *, true_lengths: bool = False) -> list[Figures]:
    """Requests with the predictions that this code makes of them; runs in the order in which they were made.

    Args:
        true_lengths: Ask with the length that the output came to have, in place of what was known.
    """
    told: list[Figures] = []
    for recording, answers in reforecasts(recordings, true_lengths=true_lengths):
        told += [_with(figure, answers.get(figure.request)) for figure in figures(recording)]
    return told


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a question. ``scale``: factor on step times behind the answer; ``transit_ns``: to the engine."""

    answer: LatencyPrediction
    scale: float
    transit_ns: int


def reforecasts(
    recordings: Sequence[Recording], *, true_lengths: bool = False
) -> Iterator[tuple[Recording, dict[str, Asked]]]:
    """Runs in the order in which they were made, each with the answers by request; the actor goes on learning."""
    step_times, _ = load_step_times({})
    config = PredictorConfig(bus=BusConfig(cluster="local"))
    actor = PredictorActor(config=config, incarnation=1, step_times=step_times, metrics=PredictorMetrics())
    for recording in sorted(recordings, key=lambda each: each.began_ns):
        for record in recording.instances:
            change = KeyChanged(bucket="instance", key=record.instance, value=record, revision=1)
            actor.handle(Message(change), recording.began_ns)
        answers = _answers(actor, recording, true_lengths)
        transit_ns = config.transit_us * 1_000
        yield (
            recording,
            {
                request: Asked(answer=answer, scale=scale, transit_ns=transit_ns)
                for request, (answer, scale) in answers.items()
            },
        )


def _answers(
    actor: PredictorActor, recording: Recording, true_lengths: bool
) -> dict[str, tuple[LatencyPrediction, float]]:
    """By request, with the factor on step times that the actor had for the instance."""
    lengths = {o.request: float(sum(o.output_tokens)) for o in recording.outcomes}
    answers: dict[str, tuple[LatencyPrediction, float]] = {}
    for at_ns, body in _in_order(recording):
        if isinstance(body, DecisionMade) and body.chosen:
            if true_lengths and body.request in lengths:
                body = msgspec.structs.replace(body, expected_output_tokens=lengths[body.request])
            answer = _asked(actor, body, at_ns)
            if isinstance(answer, LatencyPrediction):
                scale = actor.snapshot()["instances"][subject_token(body.chosen)]["scale"]
                answers[body.request] = (answer, scale)
        if isinstance(body, RequestFinished):
            known = answers.get(body.request)
            body = _predicted(body, known[0] if known else None, lengths[body.request] if true_lengths else None)
        actor.handle(Message(body), at_ns)
    return answers


def _in_order(recording: Recording) -> Iterator[tuple[int, Body]]:
    """Messages by the time at which they were sent."""
    return merge(
        ((body.at_ns, body) for body in recording.decisions),
        sorted(((o.arrival_ns + o.e2e_ns, o) for o in recording.outcomes), key=lambda each: each[0]),
        sorted(((s.at_ns, s) for s in recording.snapshots), key=lambda each: each[0]),
        key=lambda each: each[0],
    )


def _asked(actor: PredictorActor, decision: DecisionMade, at_ns: int) -> Body:
    question = PredictLatency(
        request=decision.request,
        instance=decision.chosen,
        model=decision.model,
        prompt_tokens=decision.prompt_tokens,
        max_tokens=decision.max_tokens,
        expected_output_tokens=decision.expected_output_tokens,
    )
    (reply,) = actor.handle(Message(question, reply_to="_INBOX.bench"), at_ns)
    assert isinstance(reply, Reply)
    return reply.body


def _predicted(outcome: RequestFinished, answer: LatencyPrediction | None, tokens: float | None) -> RequestFinished:
    """The outcome as it would have been published with these answers."""
    return msgspec.structs.replace(
        outcome,
        predicted_ttft_ns=None if answer is None else answer.ttft_ns,
        predicted_e2e_ns=None if answer is None else answer.e2e_ns,
        predicted_output_tokens=outcome.predicted_output_tokens if tokens is None else tokens,
    )


def _with(figure: Figures, asked: Asked | None) -> Figures:
    nan, answer = float("nan"), None if asked is None else asked.answer
    return msgspec.structs.replace(
        figure,
        predicted_ttft_s=answer.ttft_ns / 1e9 if answer else nan,
        predicted_e2e_s=answer.e2e_ns / 1e9 if answer else nan,
    )
