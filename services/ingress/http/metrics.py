"""Metrics of the HTTP side, counted in plain dictionaries and read at scrape time."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from services.ingress.metrics import LabelledCounter


class HttpMetrics(Collector):
    """Attributes are bumped by the frontend on its event loop.

    Attributes:
        responses: By (path, status); unknown paths together as ``other``.
        gone: Calls that ended with their connection, by reason.
        connections: Reads the number of open connections.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register itself; ``registry`` is what ``/metrics`` shows."""
        self.registry = registry
        self.responses = LabelledCounter()
        self.gone = LabelledCounter()
        self.connections: Callable[[], int] = int
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Families for one scrape."""
        responses = CounterMetricFamily("millrace_http_responses", "Responses begun.", labels=["path", "status"])
        for (path, status), count in list(self.responses.counts.items()):
            responses.add_metric([path, status], count)
        gone = CounterMetricFamily(
            "millrace_http_gone", "Calls whose client hung up or was disconnected before the end.", labels=["reason"]
        )
        for (reason,), count in list(self.gone.counts.items()):
            gone.add_metric([reason], count)
        yield responses
        yield gone
        yield GaugeMetricFamily("millrace_http_connections", "Open connections.", value=self.connections())

    def describe(self) -> Iterable[Metric]:
        """Nothing ahead of the first scrape."""
        return []
