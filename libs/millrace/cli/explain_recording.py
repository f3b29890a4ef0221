"""From a recording of the bus to what a request's placements were."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from millrace.actor.recording import Handled, RecordingReader, Tapped
from millrace.cli.errors import CliError
from millrace.cli.explained import Ending, Explained, Placement
from millrace.contracts.codec import MalformedMessage, decode
from millrace.contracts.message import Body
from millrace.contracts.observers import DecisionMade, RequestFinished


def explained_by_recording(file: Path, request: str) -> Explained:
    """Reads decisions and outcome of a request, or of the request that a sequence belongs to.

    Raises:
        CliError: the file cannot be read, is no recording, or names no such request.
    """
    names = {request, request.rpartition(".")[0]} - {""}  # a sequence is <request>.<choice>
    try:
        bodies = [body for body in _told(RecordingReader(file)) if body.request in names]
    except FileNotFoundError:
        raise CliError(f"there is no file {file}") from None
    except ValueError as error:
        raise CliError(str(error)) from None
    decisions = [body for body in bodies if isinstance(body, DecisionMade)]
    finished = next((body for body in bodies if isinstance(body, RequestFinished)), None)
    if not decisions and finished is None:
        raise CliError(
            f"{file} has no decision about {request!r}, nor its outcome; record `millrace tap` without a subject"
        )
    return Explained(
        request=decisions[0].request if decisions else finished.request if finished else request,
        model=decisions[0].model if decisions else finished.model if finished else "",
        placements=[_placement(decision) for decision in sorted(decisions, key=lambda d: d.at_ns)],
        ending=None if finished is None else _ending(finished),
    )


def _told(reader: RecordingReader) -> Iterator[DecisionMade | RequestFinished]:
    for frame in reader:
        body: Body | None = None
        if isinstance(frame, Tapped | Handled):
            try:
                body = decode(frame.payload if isinstance(frame, Tapped) else bytes(frame.body))
            except MalformedMessage:
                continue
        if isinstance(body, DecisionMade | RequestFinished):
            yield body


def _placement(decision: DecisionMade) -> Placement:
    return Placement(
        kind=decision.kind,
        sequences=decision.sequences,
        epoch=decision.epoch,
        at_ns=decision.at_ns,
        policy=decision.policy,
        chosen=decision.chosen,
        reason=decision.reason,
        fallback=decision.fallback,
        asked_ns=int(decision.wall_us * 1e3),
        output_tokens=decision.output_tokens,
        expected_output_tokens=decision.expected_output_tokens,
        forecasts=decision.forecasts,
        scores=decision.scores,
    )


def _ending(body: RequestFinished) -> Ending:
    return Ending(
        outcome=body.outcome,
        arrival_ns=body.arrival_ns,
        first_token_ns=None if body.ttft_ns is None else body.arrival_ns + body.ttft_ns,
        end_ns=body.arrival_ns + body.e2e_ns,
        prompt_tokens=body.prompt_tokens,
        output_tokens=sum(body.output_tokens),
        instances=body.instances,
        choices=max(1, len(body.output_tokens)),
        continuations=body.continuations,
        expected_output_tokens=body.predicted_output_tokens,
        trouble=body.detail,
    )
