"""Opens a service's telemetry: one object with its logger, registry and span sink, closed at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, BinaryIO

from prometheus_client import CollectorRegistry
from structlog.typing import FilteringBoundLogger

from millrace.actor.config import TelemetryConfig
from millrace.actor.effects import Log, RecordSpan
from millrace.files import open_private
from millrace.telemetry.logs import LEVELS, open_logger, stderr_is_terminal
from millrace.telemetry.metrics import MetricsServer, TelemetryMetrics, start_metrics_server
from millrace.telemetry.outbox import Outbox
from millrace.telemetry.spans import SpanLine, encode_span, span_line
from millrace.telemetry.trace_files import TraceFiles
from millrace.telemetry.tracecontext import parse_traceparent

#: Spans that may wait for their sink. 64 Ki of about 1 KB are 64 MB at worst; a burst of 30,000 fits whole.
SPANS_MAX = 65_536

#: Spans per export or write; a batch of 512 is some 300 KB of OTLP, well under a collector's 4 MB.
SPAN_BATCH_MAX = 512

#: Log lines that may wait.
LOG_LINES_MAX = 16_384

#: How long closing waits for each sink.
CLOSE_S = 3.0


class Telemetry:
    """A service's logs, spans and metrics. A TelemetrySink; made by ``open_telemetry``.

    Attributes:
        registry: This service's metrics; shells register theirs here.
        logger: For shells; actors log through Log effects. Has service and instance bound.
    """

    def __init__(self, *, service: str, instance: str, config: TelemetryConfig) -> None:
        self.registry = CollectorRegistry()
        self._service = service
        self._instance = instance
        self._config = config
        self._outboxes: dict[str, Outbox[Any]] = {}
        self._closers: list[Callable[[], None]] = []
        self._server: MetricsServer | None = None
        self._metrics = TelemetryMetrics(
            self.registry, service=service, instance=instance, version=package_version(), drops=self._drops
        )
        self._level = LEVELS.get(config.log_level, 0)
        self.logger: FilteringBoundLogger = open_logger(
            self._open_log(),
            form=config.log_format,
            level=config.log_level,
            colors=not config.log_file and stderr_is_terminal(),
            bound={"service": service, "instance": instance},
        )
        self._spans = self._open_spans()

    def log(self, actor: str, effect: Log) -> None:
        """Writes an actor's line: its fields, request and trace beside service and instance."""
        if LEVELS.get(effect.level, LEVELS["error"]) < self._level:
            return
        fields: dict[str, Any] = {}
        if actor and actor != self._instance:
            fields["actor"] = actor
        if effect.request:
            fields["request"] = effect.request
        if context := parse_traceparent(effect.traceparent):
            fields["trace"] = context.trace_id
        # A field of the actor's may be called "event" or "level"; it must not clash with the logger's own words.
        for name, value in effect.fields.items():
            fields[f"{name}_" if name in _RESERVED else name] = value
        level = effect.level if effect.level in LEVELS else "error"
        self._metrics.log_lines.add(level)
        getattr(self.logger, level)(effect.event, **fields)

    def span(self, actor: str, effect: RecordSpan) -> None:
        """Queues a span for its sink; dropped and counted where that is behind."""
        if self._spans is None:
            return
        line = span_line(effect, service=self._service, instance=self._instance, actor=actor)
        if line is None:
            self._metrics.malformed_spans += 1
            return
        self._metrics.spans += 1
        self._spans.put(line)

    def serve_metrics(self) -> int:
        """Starts the Prometheus endpoint where the configuration names a port; returns it, or 0 for none.

        Raises:
            OSError: the port is taken.
        """
        if self._config.metrics_port == 0:
            return 0
        return self.serve_metrics_on(self._config.metrics_port)

    def serve_metrics_on(self, port: int) -> int:
        """Starts the endpoint on a port, 0 for any free one; returns the port. Idempotent."""
        if self._server is None:
            self._server = start_metrics_server(self.registry, host=self._config.metrics_host, port=port)
        return int(self._server.server_port)

    def flush(self, timeout_s: float = CLOSE_S) -> bool:
        """Waits until what was given so far is written; False where that took too long."""
        return all(outbox.flush(timeout_s) for outbox in self._outboxes.values())

    def close(self) -> None:
        """Writes what waits, for a bounded time, and closes everything. Idempotent."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        for outbox in self._outboxes.values():
            outbox.close(CLOSE_S)
        while self._closers:
            self._closers.pop()()

    def _drops(self) -> dict[str, int]:
        return {name: outbox.dropped for name, outbox in self._outboxes.items()}

    def _open_log(self) -> Callable[[bytes], None]:
        file: BinaryIO = sys.stderr.buffer
        if self._config.log_file:
            path = Path(self._config.log_file)
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open_private(path, "ab")
            self._closers.append(file.close)

        def deliver(lines: list[bytes]) -> None:
            file.write(b"".join(lines))
            file.flush()

        outbox = Outbox("logs", deliver, items_max=LOG_LINES_MAX, batch_max=LOG_LINES_MAX)
        self._outboxes["logs"] = outbox

        def write(line: bytes) -> None:
            outbox.put(line)

        return write

    def _open_spans(self) -> Outbox[SpanLine] | None:
        deliver: Callable[[list[SpanLine]], None]
        if self._config.otlp_endpoint:
            # Imported here: it pulls in requests and protobuf, 0.3 s that a service without a collector need not pay.
            from millrace.telemetry.otlp import OtlpExporter

            exporter = OtlpExporter(
                self._config.otlp_endpoint, service=self._service, instance=self._instance, version=package_version()
            )
            self._closers.append(exporter.close)
            deliver = exporter.export
        elif self._config.trace_dir:
            files = TraceFiles(Path(self._config.trace_dir), f"{self._service}-{self._instance}")
            self._closers.append(files.close)

            def deliver(lines: list[SpanLine]) -> None:
                files.write(map(encode_span, lines))
        else:
            return None
        outbox = Outbox("spans", deliver, items_max=SPANS_MAX, batch_max=SPAN_BATCH_MAX)
        self._outboxes["spans"] = outbox
        return outbox


_RESERVED = frozenset({"event", "level", "timestamp", "time", "service", "instance", "actor", "request", "trace"})


def open_telemetry(service: str, instance: str, config: TelemetryConfig) -> Telemetry:
    """Opens logs, traces and metrics of one service.

    Args:
        service: Role, for example ``ingress``.
        instance: Unique name of this process's actor, for example ``ingress-0``.
        config: Where they go.

    Raises:
        ValueError: an unknown log format or level.
        OSError: the log file cannot be opened.
    """
    return Telemetry(service=service, instance=instance, config=config)


def package_version() -> str:
    """Version of the installed package; ``unknown`` where it runs from a tree that is not installed."""
    try:
        return version("millrace")
    except PackageNotFoundError:
        return "unknown"
