"""Spans to an OpenTelemetry collector over OTLP/HTTP.

Actors decide ids and times themselves, so the SDK's tracer, its context variables and its samplers have no part in
this: finished spans are built with the ids given and handed to the SDK's exporter on an Outbox thread. The SDK's batch
processor was rejected: its queue drops half of a large burst without a count that one could scrape.
"""

from __future__ import annotations

import json
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from millrace.telemetry.spans import SpanLine
from millrace.telemetry.tracecontext import parse_traceparent

#: A collector that takes longer than this for one batch is treated as gone; the batch is dropped and counted.
EXPORT_TIMEOUT_S = 5.0

_SCOPE = InstrumentationScope("millrace")


class OtlpExporter:
    """Exports batches of spans. ``endpoint`` is the base URL; ``/v1/traces`` is added where it is missing."""

    def __init__(self, endpoint: str, *, service: str, instance: str, version: str) -> None:
        url = endpoint if endpoint.endswith("/v1/traces") else endpoint.rstrip("/") + "/v1/traces"
        self._exporter = OTLPSpanExporter(endpoint=url, timeout=EXPORT_TIMEOUT_S)
        self._resource = Resource(
            {
                "service.name": service,
                "service.namespace": "millrace",
                "service.instance.id": instance,
                "service.version": version,
            }
        )

    def export(self, lines: list[SpanLine]) -> None:
        """Sends one batch.

        Raises:
            ConnectionError: the collector did not take it.
        """
        result = self._exporter.export([readable_span(line, self._resource) for line in lines])
        if result is not SpanExportResult.SUCCESS:
            raise ConnectionError("the collector did not take a batch of spans")

    def close(self) -> None:
        """Gives up retries and closes connections."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


def readable_span(line: SpanLine, resource: Resource) -> ReadableSpan:
    """The SDK's form of a finished span, with the ids and times of the line."""
    context = _span_context(line.trace, line.span)
    return ReadableSpan(
        name=line.name,
        context=context,
        parent=_span_context(line.trace, line.parent) if line.parent else None,
        resource=resource,
        attributes=_attributes(line.attributes | ({"actor": line.actor} if line.actor else {})),
        events=[Event(name, _attributes(attributes), at_ns) for name, at_ns, attributes in line.events],
        links=[Link(_span_context(c.trace_id, c.span_id)) for c in map(parse_traceparent, line.links) if c],
        kind=SpanKind.INTERNAL if line.parent else SpanKind.SERVER,
        status=Status(StatusCode.ERROR, line.error) if line.error else Status(StatusCode.UNSET),
        start_time=line.start_ns,
        end_time=line.end_ns,
        instrumentation_scope=_SCOPE,
    )


def _span_context(trace_id: str, span_id: str) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    """Values that OTLP knows: numbers, text, flat lists of one type; None is left out, the rest becomes JSON text."""
    return {key: _attribute(value) for key, value in attributes.items() if value is not None}


def _attribute(value: object) -> object:
    if isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list | tuple) and len({type(item) for item in value}) == 1:
        return list(value) if isinstance(value[0], str | bool | int | float) else json.dumps(value, default=str)
    return json.dumps(value, default=str)
