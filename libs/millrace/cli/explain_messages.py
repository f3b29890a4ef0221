"""From messages of the bus to what a request's placements were. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.cli.errors import CliError
from millrace.cli.explained import Explained, ExplainedPlacement
from millrace.cli.field_text import duration
from millrace.contracts.migration import MigrationFinished, MigrationOutcome
from millrace.contracts.observers import DecisionMade, RequestFinished
from millrace.contracts.sequences import request_id_of

Told = DecisionMade | RequestFinished | MigrationFinished


def explained_by_messages(told: Sequence[tuple[int, Told]], request: str) -> Explained:
    """From what was heard of a request, with the time of each message, unix ns.

    Raises:
        CliError: neither a decision nor an outcome is among them.
    """
    names = {request, request_id_of(request)}
    decisions = [body for _, body in told if isinstance(body, DecisionMade)]
    ends = [body for _, body in told if isinstance(body, RequestFinished)]
    finished = next((body for body in ends if body.request in names), None)
    placed = [ExplainedPlacement(decision=decision) for decision in decisions]
    moves = [_move(body, at_ns) for at_ns, body in told if isinstance(body, MigrationFinished)]
    if not decisions and finished is None:
        raise CliError(f"no decision about {request!r} was heard, nor its outcome")
    return Explained(
        request=finished.request if finished else decisions[0].request,
        model=finished.model if finished else decisions[0].model,
        placements=sorted([*placed, *moves], key=lambda p: p.decision.at_ns),
        ending=finished,
    )


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
