"""From spans to what a request's placements were. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from millrace.cli.errors import CliError
from millrace.cli.explained import Explained, ExplainedPlacement
from millrace.cli.field_text import duration
from millrace.cli.trace_reading import attribute
from millrace.contracts.observers import (
    CandidateForecast,
    CandidateScore,
    CascadeAttempt,
    DecisionMade,
    RequestFinished,
)
from millrace.telemetry.spans import SpanLine

T = TypeVar("T")

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
        request=_text(root or placed[0], "request"),
        model=_text(root, "model") if root is not None else "",
        placements=sorted(placements, key=lambda placement: placement.decision.at_ns),
        ending=None if root is None else _ending(root, expected),
    )


def _placement(spans: list[SpanLine], asked_ns: int, expected: float | None) -> ExplainedPlacement:
    first = spans[0]
    decision = DecisionMade(
        request=_text(first, "request"),
        sequences=[_text(span, "sequence") or "?" for span in spans],
        epoch=_count(first, "epoch"),
        kind="migration" if first.name == "move" else first.name,
        policy=_text(first, "policy") or "?",
        model="",
        chosen=_text(first, "instance"),
        reason=_reason(first),
        scores=_read_scores(_text(first, "scores")),
        at_ns=first.start_ns,
        wall_us=asked_ns / 1e3,
        output_tokens=_count(first, "output_tokens"),
        expected_output_tokens=_number(attribute(first, "expected_output_tokens")) or expected,
        forecasts=_decoded(_forecasts, attribute(first, "forecasts")),
        fallback=_text(first, "fallback"),
    )
    return ExplainedPlacement(decision=decision, trouble=first.error, source=_text(first, "source"))


def _with_move(placement: ExplainedPlacement, moves: Mapping[Any, SpanLine], span: SpanLine) -> ExplainedPlacement:
    """A migration with what its migrator recorded of it."""
    move = moves.get(attribute(span, "migration")) if placement.decision.kind == "migration" else None
    if move is None:
        return placement
    pause = duration(int(1e6 * (_number(attribute(move, "frozen_ms")) or 0.0)))
    copied = f"{attribute(move, 'rounds')} rounds, {attribute(move, 'bytes')} bytes, no token for {pause}"
    decision = placement.decision
    if not decision.reason:
        decision = msgspec.structs.replace(decision, reason=_text(move, "reason"))
    return msgspec.structs.replace(placement, decision=decision, why=_text(move, "note"), copied=copied)


def _bounds(spans: list[SpanLine]) -> dict[tuple[str, str], int]:
    """Bound of an instance's steps while a sequence was there, as its worker recorded it."""
    told = [span for span in spans if attribute(span, "step_tokens_max")]
    return {(_text(span, "sequence"), _text(span, "instance")): _count(span, "step_tokens_max") for span in told}


def _with_bound(placement: ExplainedPlacement, bounds: Mapping[tuple[str, str], int]) -> ExplainedPlacement:
    found = [bounds.get((sequence, placement.decision.chosen), 0) for sequence in placement.decision.sequences]
    return msgspec.structs.replace(placement, step_tokens_max=max(found, default=0))


def _reason(span: SpanLine) -> str:
    reason, cause = _text(span, "reason"), _text(span, "cause")
    kept = attribute(span, "kv_tokens")
    reason += f"; {kept} tokens needed no computing there" if kept else ""
    return f"{cause}; {reason}" if cause else reason


def _decoded(decoder: msgspec.json.Decoder[list[T]], text: Any) -> list[T]:
    try:
        return decoder.decode(text) if text else []
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


def _ending(root: SpanLine, expected: float | None) -> RequestFinished:
    first = next((at_ns for name, at_ns, _ in root.events if name == "first_token"), None)
    return RequestFinished(
        request=_text(root, "request"),
        model=_text(root, "model"),
        outcome=_text(root, "outcome") or "?",
        ingress=root.instance,
        detail=root.error,
        prompt_tokens=_count(root, "prompt_tokens"),
        cached_tokens=_count(root, "cached_tokens"),
        output_tokens=[_count(root, "output_tokens")],
        finish_reasons=_text(root, "finish_reasons").split(", "),
        continuations=_count(root, "continuations"),
        predicted_output_tokens=expected,
        arrival_ns=root.start_ns,
        ttft_ns=None if first is None else first - root.start_ns,
        e2e_ns=root.end_ns - root.start_ns,
        instances=[name for name in _text(root, "instances").split(", ") if name],
        migrations=_count(root, "migrations"),
        attempts=_decoded(_attempts, attribute(root, "attempts")),
        reason=_text(root, "reason"),
    )


def _text(span: SpanLine, name: str) -> str:
    return str(attribute(span, name) or "")


def _count(span: SpanLine, name: str) -> int:
    return int(attribute(span, name) or 0)


def _number(value: Any) -> float | None:
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None
