"""Stands in for the OpenTelemetry collector where its image cannot be had: keeps spans as `millrace trace` reads them.

Runs in a container of the control image, from which it takes what it imports. It listens where collector.yaml says and
reads nothing else of it.
"""

from __future__ import annotations

import http.server
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from millrace.telemetry.spans import SpanLine, encode_span
from millrace.telemetry.trace_files import TraceFiles
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

PORT = 4318
#: On a file system in memory: the container's own is read-only.
FOLDER = Path("/tmp/traces")  # in a container of its own
_ERROR = 2


class Receiver(http.server.BaseHTTPRequestHandler):
    """OTLP/HTTP: each request holds spans."""

    files = TraceFiles(FOLDER, "otlp")
    lock = threading.Lock()

    def do_POST(self) -> None:
        """Writes its spans, one line each."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with self.lock:
            self.files.write(map(encode_span, lines(ExportTraceServiceRequest.FromString(body))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Says nothing of each request."""


def lines(request: ExportTraceServiceRequest) -> Iterator[SpanLine]:
    """The spans of a request. Links, which `millrace trace` can do without, are left out."""
    for resource in request.resource_spans:
        about = _values(resource.resource.attributes)
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield _line(span, about)


def _line(span: Any, about: dict[str, Any]) -> SpanLine:
    attributes = _values(span.attributes)
    return SpanLine(
        trace=span.trace_id.hex(),
        span=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        name=span.name,
        service=str(about.get("service.name", "")),
        instance=str(about.get("service.instance.id", "")),
        actor=str(attributes.pop("actor", "")),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=attributes,
        events=[(event.name, event.time_unix_nano, _values(event.attributes)) for event in span.events],
        error=span.status.message if span.status.code == _ERROR else "",
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None


def main() -> int:
    """Serves until it is killed."""
    # All interfaces of its container, which publishes no port.
    http.server.ThreadingHTTPServer(("0.0.0.0", PORT), Receiver).serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
