"""A recorded span as a value: the line in `.millrace/traces/`, made from a RecordSpan effect."""

from __future__ import annotations

from typing import Any

import msgspec

from millrace.actor.effects import RecordSpan
from millrace.telemetry.tracecontext import parse_traceparent


class SpanLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One span.

    Attributes:
        trace: Trace id, 32 hex digits.
        span: Span id, 16 hex digits.
        parent: Parent's span id; empty for a root.
        links: Traceparents of linked spans.
        events: Triples of (name, unix ns, attributes).
        error: What went wrong; empty where nothing did.
    """

    trace: str
    span: str
    parent: str = ""
    name: str
    service: str
    instance: str
    actor: str = ""
    start_ns: int
    end_ns: int
    attributes: dict[str, Any] = {}
    links: list[str] = []
    events: list[tuple[str, int, dict[str, Any]]] = []
    error: str = ""


def span_line(effect: RecordSpan, *, service: str, instance: str, actor: str) -> SpanLine | None:
    """The line of an effect; None where its traceparent is malformed (the caller counts it)."""
    context = parse_traceparent(effect.traceparent)
    if context is None:
        return None
    return SpanLine(
        trace=context.trace_id,
        span=context.span_id,
        parent=effect.parent_span_id,
        name=effect.name,
        service=service,
        instance=instance,
        actor=actor,
        start_ns=effect.start_ns,
        end_ns=effect.end_ns,
        attributes=effect.attributes,
        links=effect.links,
        events=effect.events,
        error=effect.error,
    )


_encoder = msgspec.json.Encoder(enc_hook=str)
_decoder = msgspec.json.Decoder(SpanLine)


def encode_span(line: SpanLine) -> bytes:
    """JSON of a span, without newline; attribute values that JSON does not know become text."""
    return _encoder.encode(line)


def decode_span(line: bytes) -> SpanLine | None:
    """Reads a line; None for one that is cut off or no span (a process was killed while it wrote)."""
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
