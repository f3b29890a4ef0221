"""From spans to what a request's placements were. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from millrace.cli.errors import CliError
from millrace.cli.explained import Ending, Explained, ExplainedPlacement
from millrace.cli.field_text import duration
from millrace.cli.trace_reading import attribute
from millrace.contracts.observers import CandidateForecast, CandidateScore, CascadeAttempt
from millrace.telemetry.spans import SpanLine

_forecasts = msgspec.json.Decoder(list[CandidateForecast])
_attempts = msgspec.json.Decoder(list[CascadeAttempt])


def explained_by_spans(spans: list[SpanLine]) -> Explained:
    """Reads what ingress wrote into its spans; spans of others are left aside.

    Raises:
        CliError: no span of an ingress is among them.
    """
    placed = [span for span in spans if span.name in ("dispatch", "continuation", "move")]
    root = next((span for span in spans if span.name == "ingress"), None)
    if root is None and not placed:
        raise CliError("the ingress's spans of this request are not recorded; `millrace trace` shows what is")
    tags = [span for span in spans if span.name == "tag"]
    expected = next((_number(attribute(tag, "expected_output_tokens")) for tag in tags), None)
    asked = {span.end_ns: span.end_ns - span.start_ns for span in spans if span.name == "forecast"}
    groups: dict[tuple[Any, ...], list[SpanLine]] = {}
    for span in placed:
        key = (span.start_ns, attribute(span, "instance"), attribute(span, "epoch"), span.error)
        groups.setdefault(key, []).append(span)
    moves = {attribute(span, "migration"): span for span in spans if span.name == "migration"}
    bounds = _bounds(spans)
    placements = [
        _with_bound(_with_move(_placement(group, asked.get(group[0].start_ns, 0), expected), moves, group[0]), bounds)
        for group in groups.values()
    ]
    return Explained(
        request=str(attribute(root or placed[0], "request") or ""),
        model=str(attribute(root, "model") or "") if root is not None else "",
        placements=sorted(placements, key=lambda placement: placement.at_ns),
        ending=None if root is None else _ending(root, expected),
        attempts=[] if root is None else _read_attempts(attribute(root, "attempts")),
        delivered=_delivered(root),
    )


def _read_attempts(text: Any) -> list[CascadeAttempt]:
    try:
        return _attempts.decode(text) if text else []
    except (msgspec.DecodeError, TypeError):  # an earlier version's, or not ours
        return []


def _delivered(root: SpanLine | None) -> str:
    return "" if root is None else str(attribute(root, "reason") or "")


def _placement(spans: list[SpanLine], asked_ns: int, expected: float | None) -> ExplainedPlacement:
    first = spans[0]
    return ExplainedPlacement(
        kind="migration" if first.name == "move" else first.name,
        sequences=[str(attribute(span, "sequence") or "?") for span in spans],
        epoch=int(attribute(first, "epoch") or 0),
        at_ns=first.start_ns,
        policy=str(attribute(first, "policy") or "?"),
        chosen=str(attribute(first, "instance") or ""),
        reason=_reason(first),
        fallback=str(attribute(first, "fallback") or ""),
        asked_ns=asked_ns,
        output_tokens=int(attribute(first, "output_tokens") or 0),
        expected_output_tokens=_number(attribute(first, "expected_output_tokens")) or expected,
        forecasts=_read_forecasts(attribute(first, "forecasts")),
        scores=_read_scores(str(attribute(first, "scores") or "")),
        trouble=first.error,
        source=str(attribute(first, "source") or ""),
    )


def _with_move(placement: ExplainedPlacement, moves: Mapping[Any, SpanLine], span: SpanLine) -> ExplainedPlacement:
    """A migration with what its migrator recorded of it."""
    move = moves.get(attribute(span, "migration")) if placement.kind == "migration" else None
    if move is None:
        return placement
    pause = duration(int(1e6 * (_number(attribute(move, "frozen_ms")) or 0.0)))
    copied = f"{attribute(move, 'rounds')} rounds, {attribute(move, 'bytes')} bytes, no token for {pause}"
    reason, why = str(attribute(move, "reason") or ""), str(attribute(move, "note") or "")
    return msgspec.structs.replace(placement, reason=placement.reason or reason, why=why, copied=copied)


def _bounds(spans: list[SpanLine]) -> dict[tuple[str, str], int]:
    """Bound of an instance's steps while a sequence was there, as its worker recorded it."""
    told = [span for span in spans if attribute(span, "step_tokens_max")]
    return {
        (str(attribute(span, "sequence")), str(attribute(span, "instance"))): int(attribute(span, "step_tokens_max"))
        for span in told
    }


def _with_bound(placement: ExplainedPlacement, bounds: Mapping[tuple[str, str], int]) -> ExplainedPlacement:
    found = [bounds.get((sequence, placement.chosen), 0) for sequence in placement.sequences]
    return msgspec.structs.replace(placement, step_tokens_max=max(found, default=0))


def _reason(span: SpanLine) -> str:
    reason, cause = str(attribute(span, "reason") or ""), str(attribute(span, "cause") or "")
    kept = attribute(span, "kv_tokens")
    reason += f"; {kept} tokens needed no computing there" if kept else ""
    return f"{cause}; {reason}" if cause else reason


def _read_forecasts(text: Any) -> list[CandidateForecast]:
    try:
        return _forecasts.decode(text) if text else []
    except (msgspec.DecodeError, TypeError):  # an earlier version's, or not ours
        return []


def _read_scores(text: str) -> list[CandidateScore]:
    """``w0=1.000, w1=0.250``, as ingress writes them."""
    scores = []
    for pair in text.split(", "):
        name, _, number = pair.rpartition("=")
        score = _number(number)
        if name and score is not None:
            scores.append(CandidateScore(name, score))
    return scores


def _ending(root: SpanLine, expected: float | None) -> Ending:
    first = next((at_ns for name, at_ns, _ in root.events if name == "first_token"), None)
    reasons = str(attribute(root, "finish_reasons") or "")
    return Ending(
        outcome=str(attribute(root, "outcome") or "?"),
        arrival_ns=root.start_ns,
        first_token_ns=first,
        end_ns=root.end_ns,
        prompt_tokens=int(attribute(root, "prompt_tokens") or 0),
        output_tokens=int(attribute(root, "output_tokens") or 0),
        instances=[name for name in str(attribute(root, "instances") or "").split(", ") if name],
        cached_tokens=int(attribute(root, "cached_tokens") or 0),
        choices=reasons.count(",") + 1,
        continuations=int(attribute(root, "continuations") or 0),
        migrations=int(attribute(root, "migrations") or 0),
        expected_output_tokens=expected,
        trouble=root.error,
    )


def _number(value: Any) -> float | None:
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None
