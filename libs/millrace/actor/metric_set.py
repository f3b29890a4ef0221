"""Metrics of an actor, each declared once: plain figures that the actor bumps and Prometheus reads on each scrape.

An actor counts without a metrics library (``histograms.py`` says why); a ``MetricSet`` knows under which names its
figures are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from millrace.actor.histograms import Histogram, LatencyHistogram

LabelledFamily = TypeVar("LabelledFamily", CounterMetricFamily, GaugeMetricFamily)


class LabelledCounter:
    """Counts by label values. ``series_max`` bounds what clients can make it hold; beyond it ``other`` counts."""

    __slots__ = ("_series_max", "counts")

    def __init__(self, series_max: int = 1_000) -> None:
        self.counts: dict[tuple[str, ...], int] = {}
        self._series_max = series_max

    def add(self, *labels: str, by: int = 1) -> None:
        try:
            self.counts[labels] += by
        except KeyError:
            labels = labels if len(self.counts) < self._series_max else ("other",) * len(labels)
            self.counts[labels] = self.counts.get(labels, 0) + by

    def plain(self) -> dict[str, int]:
        """Counts by label values, joined by slashes."""
        return {"/".join(labels): count for labels, count in self.counts.items()}

    def total(self) -> int:
        return sum(self.counts.values())


class MetricSet(Collector):
    """Metrics of one actor. A subclass declares them in its constructor, in the order in which they are shown."""

    def __init__(self, prefix: str, registry: CollectorRegistry | None) -> None:
        """``prefix``: of every name, such as ``millrace_ingress``."""
        self._prefix = prefix
        self._families: list[Callable[[], Metric]] = []
        if registry is not None:
            registry.register(self)

    def counter(self, name: str, text: str, *labels: str, series_max: int = 1_000) -> LabelledCounter:
        counter = LabelledCounter(series_max)
        self.counters(name, text, *labels, read=lambda: [(*values, n) for values, n in list(counter.counts.items())])
        return counter

    def latency(self, name: str, text: str, bounds_s: Sequence[float]) -> LatencyHistogram:
        """Declare a histogram of durations, shown as ``<name>_seconds``."""
        histogram = LatencyHistogram(bounds_s)
        self._show(partial(_histograms, f"{self._prefix}_{name}_seconds", text, (), {(): histogram}))
        return histogram

    def histograms(
        self, name: str, text: str, label: str, values: Iterable[str], bounds: Sequence[float]
    ) -> dict[str, Histogram]:
        by_value = {value: Histogram(bounds) for value in values}
        by_labels: dict[tuple[str, ...], Histogram] = {(value,): histogram for value, histogram in by_value.items()}
        self._show(partial(_histograms, f"{self._prefix}_{name}", text, (label,), by_labels))
        return by_value

    def total(self, name: str, text: str) -> None:
        """Declare the attribute of that name as a counter."""
        self._show(lambda: CounterMetricFamily(f"{self._prefix}_{name}", text, value=getattr(self, name)))

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        self._show(lambda: GaugeMetricFamily(f"{self._prefix}_{name}", text, value=read()))

    def gauges(self, name: str, text: str, *labels: str, read: Callable[[], Iterable[tuple[Any, ...]]]) -> None:
        """Declare a gauge with labels. ``read`` yields their values, then the figure."""
        self._show(lambda: _labelled(GaugeMetricFamily(f"{self._prefix}_{name}", text, labels=labels), read()))

    def counters(self, name: str, text: str, *labels: str, read: Callable[[], Iterable[tuple[Any, ...]]]) -> None:
        """Declare a counter with labels that is kept elsewhere, as ``gauges`` does."""
        self._show(lambda: _labelled(CounterMetricFamily(f"{self._prefix}_{name}", text, labels=labels), read()))

    def _show(self, family: Callable[[], Metric]) -> None:
        self._families.append(family)

    def collect(self) -> Iterable[Metric]:
        return [family() for family in self._families]

    def describe(self) -> Iterable[Metric]:
        """Nothing ahead of the first scrape: names do not depend on anything."""
        return []


def _histograms(name: str, text: str, labels: Sequence[str], found: Mapping[tuple[str, ...], Histogram]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, histogram in found.items():
        family.add_metric(values, histogram.buckets(), histogram.sum)
    return family


def _labelled(family: LabelledFamily, rows: Iterable[tuple[Any, ...]]) -> LabelledFamily:
    for *values, figure in rows:
        family.add_metric(values, figure)
    return family
