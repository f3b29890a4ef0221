"""From a recording of the bus to what a request's placements were."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from millrace.actor.recording import RecordingReader
from millrace.cli.errors import CliError
from millrace.cli.explained import Explained, ExplainedPlacement
from millrace.cli.field_text import duration
from millrace.contracts.codec import MalformedMessage, decode
from millrace.contracts.migration import MigrationFinished, MigrationOutcome
from millrace.contracts.observers import DecisionMade, RequestFinished
from millrace.contracts.sequences import request_id_of

Told = DecisionMade | RequestFinished | MigrationFinished


def explained_by_recording(file: Path, request: str) -> Explained:
    """Reads decisions and outcome of a request, or of the request that a sequence belongs to.

    Raises:
        CliError: the file cannot be read, is no recording, or names no such request.
    """
    names = {request, request_id_of(request)}
    try:
        told = [(at_ns, body) for at_ns, body in _told(RecordingReader(file)) if names & _requests_of(body)]
        return explained_by_messages(told, request)
    except NothingHeard:
        raise CliError(
            f"{file} has no decision about {request!r}, nor its outcome; record `millrace tap` without a subject"
        ) from None
    except FileNotFoundError:
        raise CliError(f"there is no file {file}") from None
    except ValueError as error:
        raise CliError(str(error)) from None


class NothingHeard(CliError):
    """No message is about the request."""


def explained_by_messages(told: Sequence[tuple[int, Told]], request: str) -> Explained:
    """From what was heard of a request, with the time of each message, unix ns.

    Raises:
        NothingHeard: neither a decision nor an outcome is among them.
    """
    names = {request, request_id_of(request)}
    decisions = [body for _, body in told if isinstance(body, DecisionMade)]
    ends = [body for _, body in told if isinstance(body, RequestFinished)]
    finished = next((body for body in ends if body.request in names), None)
    placed = [ExplainedPlacement(decision=decision) for decision in decisions]
    moves = [_move(body, at_ns) for at_ns, body in told if isinstance(body, MigrationFinished)]
    if not decisions and finished is None:
        raise NothingHeard(f"no decision about {request!r} was heard, nor its outcome")
    return Explained(
        request=finished.request if finished else decisions[0].request,
        model=finished.model if finished else decisions[0].model,
        placements=sorted([*placed, *moves], key=lambda p: p.decision.at_ns),
        ending=finished,
    )


def _requests_of(body: Told) -> set[str]:
    """The request, and the one of a cascade that it is an attempt of (``<request>~<number>``)."""
    own = request_id_of(body.sequence) if isinstance(body, MigrationFinished) else body.request
    return {own, own.partition("~")[0]}


def _told(reader: RecordingReader) -> Iterator[tuple[int, Told]]:
    for frame in reader:
        try:
            body = decode(frame.payload)
        except MalformedMessage:
            continue
        if isinstance(body, DecisionMade | RequestFinished | MigrationFinished):
            yield frame.at_ns, body


def _move(body: MigrationFinished, at_ns: int) -> ExplainedPlacement:
    moved = body.outcome is MigrationOutcome.MOVED
    trouble = f"{body.outcome}, {body.refusal or 'no reason told'} {body.detail}".rstrip()
    return ExplainedPlacement(
        decision=DecisionMade(
            request=request_id_of(body.sequence),
            sequences=[body.sequence],
            epoch=body.epoch,
            kind="migration",
            policy="",
            model=body.model,
            chosen=body.target,
            reason=str(body.reason),
            at_ns=at_ns - body.cost.duration_ns,
        ),
        trouble="" if moved else trouble,
        source=body.source,
        why=body.note,
        copied=f"{body.cost.rounds} rounds, {body.cost.bytes} bytes, no token for {duration(body.cost.frozen_ns)}",
    )
