"""Metrics parts that all services share: the endpoint, and the telemetry's own figures.

Names are ``millrace_<noun>_<unit>``; each service defines its own in ``services/<noun>/metrics.py`` on the registry
of its Telemetry, so that two clusters in one process do not share a number.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from millrace.actor.metric_set import MetricSet


class TelemetryMetrics(MetricSet):
    """Figures that every service has."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        service: str,
        instance: str,
        version: str,
        drops: Callable[[], dict[str, int]],
    ) -> None:
        """``drops`` yields the count of each sink: they are read when somebody scrapes."""
        super().__init__("millrace", registry)
        info, names = (service, instance, version, 1), ("service", "instance", "version")
        self.gauges("service_info", "Always 1", *names, read=lambda: [info])
        self.log_lines = self.counter("log_lines", "Log lines written", "level")
        self.spans = self.malformed_spans = 0
        self.total("spans", "Spans recorded")
        self.total("malformed_spans", "Spans that had no readable traceparent")
        dropped = "Spans and log lines dropped because their sink was behind or refused them"
        self.counters("telemetry_dropped", dropped, "sink", read=lambda: sorted(drops().items()))
        ProcessCollector(registry=registry)


class MetricsServer(ThreadingWSGIServer):
    """Serves on a thread that sleeps until somebody asks: prometheus_client's own looks twice a second whether it ends,
    which wakes each idle process of a cluster so often.
    """

    def shutdown(self) -> None:
        with suppress(OSError):  # no such end of a listener in other systems than Linux: the thread is a daemon
            self.socket.shutdown(socket.SHUT_RDWR)
            super().shutdown()


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        """Scrapes are no news."""


def start_metrics_server(registry: CollectorRegistry, *, host: str, port: int) -> MetricsServer:
    """Serves ``/metrics`` on a daemon thread; port 0 takes a free one, ``server.server_port`` says which.

    Raises:
        OSError: the port is taken.
    """

    class Server(MetricsServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    server = make_server(host, port, make_wsgi_app(registry), Server, handler_class=_QuietHandler)
    threading.Thread(target=server.serve_forever, args=(None,), name="millrace-metrics", daemon=True).start()
    return server
