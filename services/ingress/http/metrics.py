"""Metrics of the HTTP side, counted in plain dictionaries and read at scrape time."""

from __future__ import annotations

from collections.abc import Callable

from millrace.actor.metric_set import MetricSet
from prometheus_client.registry import CollectorRegistry


class HttpMetrics(MetricSet):
    """Bumped by the HTTP side on its event loop.

    Attributes:
        responses: By (path, status); unknown paths together as ``other``.
        connections: Reads the number of open connections.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__("millrace_http", registry)
        self.registry = registry
        self.responses = self.counter("responses", "Responses begun.", "path", "status")
        self.gone = self.counter("gone", "Calls whose client hung up or was disconnected before the end.", "reason")
        self.connections: Callable[[], int] = int
        self.gauge("connections", "Open connections.", self._connections_now)

    def _connections_now(self) -> int:
        return self.connections()  # set by the server, after this
