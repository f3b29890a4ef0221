"""Metrics of a judge: plain figures that the actor updates and Prometheus reads on each scrape."""

from __future__ import annotations

from millrace.actor.metric_set import MetricSet
from prometheus_client.registry import CollectorRegistry

#: Seconds: one evaluation in process, to the longest that an asker waits.
_BOUNDS_S = (1e-5, 1e-4, 1e-3, 1e-2, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0)


class JudgeMetrics(MetricSet):
    """All of one judge.

    Attributes:
        judged: By result: ``scored``, ``unscored``, ``refused``, ``timeout``, ``status``, ``unreachable``.
        waiting: Questions that wait for a model.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        super().__init__("millrace", registry)
        self.judged = self.counter("judge_answers", "Answers judged, by result.", "result")
        self.seconds = self.latency("judge", "From the question to its answer.", _BOUNDS_S)
        self.waiting = 0
        self.gauge("judge_waiting", "Questions that wait for a model.", lambda: self.waiting)
