"""The span of a migration, with its rounds as events.

It is a child of the span that placed the sequence; its context travels with each of its messages. What the target's
worker does with the sequence afterwards is below a span of ingress, whose context came with the epoch. So the request's
trace stays one tree.
"""

from __future__ import annotations

from random import Random

from millrace.actor.effects import Effect, RecordSpan
from millrace.telemetry.tracecontext import child, format_traceparent, parse_traceparent

from services.migrator.state import OutgoingMigration


def below(traceparent: str, rng: Random) -> str:
    """Context of a new span below another one; the same again where nothing is sampled."""
    parent = parse_traceparent(traceparent)
    if parent is None or not parent.sampled:
        return traceparent
    return format_traceparent(child(parent, rng))


def source_span(out: OutgoingMigration, end_ns: int) -> list[Effect]:
    """The whole migration."""
    error = "" if out.refusal is None else f"{out.outcome}: {out.refusal} {out.detail}".strip()
    attributes = {
        "millrace.migration": out.migration,
        "millrace.sequence": out.sequence,
        "millrace.source": out.source,
        "millrace.target": out.target,
        "millrace.reason": str(out.order.reason),
        "millrace.note": out.order.note,
        "millrace.mode": str(out.mode),
        "millrace.outcome": str(out.outcome),
        "millrace.epoch": out.room.epoch,
        "millrace.rounds": out.copy.round,
        "millrace.matched_blocks": out.copy.matched_blocks,
        "millrace.bytes": out.copy.bytes,
        "millrace.descriptors": out.copy.descriptors,
        "millrace.copier": out.copy.copier,
        "millrace.tokens": out.tokens,
        "millrace.frozen_ms": out.frozen_ns / 1e6,
    }
    own, parent = parse_traceparent(out.span), parse_traceparent(out.traceparent)
    if own is None or parent is None or not own.sampled:
        return []
    return [
        RecordSpan(
            name="migration",
            traceparent=out.span,
            parent_span_id=parent.span_id,
            start_ns=out.started_ns,
            end_ns=max(out.started_ns, end_ns),
            attributes=attributes,
            events=list(out.events),
            error=error,
        )
    ]
