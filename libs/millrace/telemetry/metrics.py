"""Metrics parts that all services share: the endpoint, and the telemetry's own figures.

Names are ``millrace_<noun>_<unit>``; each service defines its own in ``services/<noun>/metrics.py`` on the registry
of its Telemetry, so that two clusters in one process do not share a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily


class DropsCollector:
    """Reads the outboxes' own counts at scrape time: nothing is counted twice on the hot path."""

    def __init__(self, drops: Callable[[], dict[str, int]]) -> None:
        """``drops`` yields the count of each sink."""
        self._drops = drops

    def collect(self) -> Iterator[CounterMetricFamily]:
        """The metric ``millrace_telemetry_dropped_total{sink}``."""
        family = CounterMetricFamily(
            "millrace_telemetry_dropped",
            "Spans and log lines dropped because their sink was behind or refused them",
            labels=["sink"],
        )
        for sink, count in sorted(self._drops().items()):
            family.add_metric([sink], count)
        yield family


class TelemetryMetrics:
    """Figures that every service has."""

    def __init__(self, registry: CollectorRegistry, *, service: str, instance: str, version: str) -> None:
        """Registers them."""
        info = Gauge("millrace_service_info", "Always 1", ["service", "instance", "version"], registry=registry)
        info.labels(service=service, instance=instance, version=version).set(1)
        self.log_lines = Counter("millrace_log_lines_total", "Log lines written", ["level"], registry=registry)
        self.spans = Counter("millrace_spans_total", "Spans recorded", registry=registry)
        self.malformed_spans = Counter(
            "millrace_malformed_spans_total", "Spans that had no readable traceparent", registry=registry
        )
        ProcessCollector(registry=registry)


def start_metrics_server(registry: CollectorRegistry, *, host: str, port: int) -> WSGIServer:
    """Serves ``/metrics`` on a daemon thread; port 0 takes a free one, ``server.server_port`` says which.

    Raises:
        OSError: the port is taken.
    """
    server, _ = start_http_server(port, addr=host, registry=registry)
    return server
