"""Metrics of a judge: plain figures that the actor updates and Prometheus reads on each scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from millrace.actor.histograms import LatencyHistogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

#: Seconds: one evaluation in process, to the longest that an asker waits.
_BOUNDS_S = (1e-5, 1e-4, 1e-3, 1e-2, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0)


class JudgeMetrics(Collector):
    """All of one judge.

    Attributes:
        judged: By result: ``scored``, ``unscored``, ``refused``, ``timeout``, ``status``, ``unreachable``.
        seconds: From the question to its answer.
        waiting: Questions that wait for a model.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.judged: Counter[str] = Counter()
        self.seconds = LatencyHistogram(_BOUNDS_S)
        self.waiting = 0
        if registry is not None:
            registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """Nothing ahead of the first scrape."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Families for one scrape."""
        judged = CounterMetricFamily("millrace_judge_answers", "Answers judged, by result.", labels=["result"])
        for result, count in self.judged.items():
            judged.add_metric([result], count)
        yield judged
        seconds = HistogramMetricFamily("millrace_judge_seconds", "From the question to its answer.")
        seconds.add_metric([], self.seconds.buckets(), self.seconds.sum_s())
        yield seconds
        yield GaugeMetricFamily("millrace_judge_waiting", "Questions that wait for a model.", value=self.waiting)
