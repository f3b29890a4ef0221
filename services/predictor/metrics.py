"""Metrics of a predictor: plain figures that the actor updates and Prometheus reads on each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from millrace.actor.metric_set import MetricSet
from prometheus_client.registry import CollectorRegistry

#: Seconds: a forecast of an idle engine, to one in Python of a full one.
_HANDLING_S = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)


class PredictorMetrics(MetricSet):
    """All of one predictor. The actor bumps them; only ``clock`` and ``instances`` come from its shell.

    Attributes:
        predictions: ``predicted``, ``malformed`` or the reason why not.
        snapshots: ``taken``, ``unregistered`` or why they were refused.
        placements: ``shown``, ``ended``, ``moved``, ``expired``, ``full``, ``unusable``.
        prefix_tokens: Prompt tokens of requests that ended: ``believed`` to be cached when they were placed, ``found``
            in the cache; of the former ``missing`` ones, of the latter ``unexpected`` ones.
        clock: Counts nanoseconds; a constant where nobody measures.
        instances: Yields (name, scale, fits) of every instance, for gauges.
    """

    def __init__(self, registry: CollectorRegistry | None = None, *, clock: Callable[[], int] = int) -> None:
        super().__init__("millrace_predictor", registry)
        self.clock = clock
        self.instances: Callable[[], Iterable[tuple[str, float, int]]] = list
        self.predictions = self.counter("predictions", "Questions, by result.", "result")
        self.snapshots = self.counter("snapshots", "Snapshots received, by result.", "result")
        text = "Placements that no snapshot showed yet, by how they went."
        self.placements = self.counter("placements", text, "result")
        text = "Prompt tokens believed to be cached, and found."
        self.prefix_tokens = self.counter("prefix_tokens", text, "kind")
        self.missing_sets = 0
        self.total("missing_sets", "Registrations whose step-time set is not here.")
        self.handling = self.latency("handling", "Time from a question's handling to its answer.", _HANDLING_S)
        self.gauges("step_scale", "Measured over modelled step time.", "instance", read=lambda: self._column(1))
        self.gauges("step_fits", "Fits of step times where no set is known.", "instance", read=lambda: self._column(2))

    def _column(self, index: int) -> list[tuple[str, float]]:
        return [(row[0], float(row[index])) for row in self.instances()]

    def judge_prefix(self, *, believed: int, found: int) -> None:
        if not believed and not found:
            return
        self.prefix_tokens.add("believed", by=believed)
        self.prefix_tokens.add("found", by=found)
        self.prefix_tokens.add("missing", by=max(0, believed - found))
        self.prefix_tokens.add("unexpected", by=max(0, found - believed))
