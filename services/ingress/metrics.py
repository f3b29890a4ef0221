"""Ingress's metrics: plain counters that the core bumps, read by Prometheus when it scrapes.

``prometheus_client``'s own objects cost 1 to 2 µs per observation (labels, locks); a histogram here is one bisect and
two additions, cheap enough for one observation per token chunk. Nothing is shared between two ingresses in a process.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

_NS = 1e9
#: Seconds. First tokens and gaps from a modelled engine's fraction of a millisecond to an overloaded one's minute.
_SHORT_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
#: Seconds. Whole requests, to the default deadline.
_LONG_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 600.0)


class LatencyHistogram:
    """Counts of nanoseconds in fixed buckets."""

    __slots__ = ("_bounds_ns", "_bounds_s", "_counts", "_sum_ns")

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self._bounds_s = bounds_s
        self._bounds_ns = [int(b * _NS) for b in bounds_s]
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_ns = 0

    def observe(self, duration_ns: int) -> None:
        """Counts one duration."""
        self._counts[bisect_left(self._bounds_ns, duration_ns)] += 1
        self._sum_ns += duration_ns

    @property
    def count(self) -> int:
        """Observations so far."""
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound in seconds, as Prometheus wants them."""
        total = 0
        out: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self._bounds_s), "+Inf"), self._counts, strict=True):
            total += count
            out.append((bound, float(total)))
        return out

    def sum_s(self) -> float:
        """Sum of all observations, seconds."""
        return self._sum_ns / _NS


class LabelledCounter:
    """Counts by label values. ``series_max`` bounds what clients can make it hold; beyond it ``other`` counts."""

    __slots__ = ("_series_max", "counts")

    def __init__(self, series_max: int = 1_000) -> None:
        self.counts: dict[tuple[str, ...], int] = {}
        self._series_max = series_max

    def add(self, *labels: str, by: int = 1) -> None:
        """Adds to one series."""
        if labels not in self.counts and len(self.counts) >= self._series_max:
            labels = ("other",) * len(labels)
        self.counts[labels] = self.counts.get(labels, 0) + by

    def total(self) -> int:
        """Sum over all series."""
        return sum(self.counts.values())


class IngressMetrics(Collector):
    """All of one ingress. Attributes are bumped by the core on its event loop; ``collect`` reads them there too.

    Attributes:
        ttft: Arrival to first token.
        itl: Between two chunks of one sequence.
        e2e: Arrival to the end of a completed call.
        queue: Arrival to acceptance by every instance asked.
        gap: From the last token before a continuation to the first one after it.
        calls: By (model, outcome).
        refusals: By kind.
        dispatches: By (policy, instance).
        continuations: By reason.
        discarded: Token chunks by what was wrong: ``late`` (old epoch, ended or unknown sequence), ``duplicate``,
            ``contradiction``, ``gap``.
        resends: By how they ended.
        tags: By how the question ended.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.ttft = LatencyHistogram(_SHORT_S)
        self.itl = LatencyHistogram(_SHORT_S)
        self.e2e = LatencyHistogram(_LONG_S)
        self.queue = LatencyHistogram(_SHORT_S)
        self.gap = LatencyHistogram(_SHORT_S)
        self.calls = LabelledCounter()
        self.refusals = LabelledCounter()
        self.dispatches = LabelledCounter(10_000)
        self.continuations = LabelledCounter()
        self.discarded = LabelledCounter()
        self.resends = LabelledCounter()
        self.tags = LabelledCounter()
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.calls_open = 0
        self.sequences_open = 0
        self.sequences_waiting = 0
        if registry is not None:
            registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Families for one scrape."""
        yield from self._histograms()
        yield from self._counters()
        yield from self._gauges()

    def describe(self) -> Iterable[Metric]:
        """Nothing ahead of the first scrape: names do not depend on anything."""
        return []

    def _histograms(self) -> Iterator[Metric]:
        for name, text, histogram in (
            ("ttft", "Time from arrival to the first token.", self.ttft),
            ("itl", "Time between two token messages of one sequence.", self.itl),
            ("e2e", "Time from arrival to completion.", self.e2e),
            ("queue", "Time from arrival until instances accepted the request.", self.queue),
            ("continuation_gap", "Time without a token around a continuation.", self.gap),
        ):
            family = HistogramMetricFamily(f"millrace_ingress_{name}_seconds", text)
            family.add_metric([], histogram.buckets(), histogram.sum_s())
            yield family

    def _counters(self) -> Iterator[Metric]:
        for name, text, labels, counter in (
            ("requests", "Calls that ended.", ["model", "outcome"], self.calls),
            ("refusals", "Calls refused or failed, by kind.", ["kind"], self.refusals),
            ("dispatches", "Sequences placed.", ["policy", "instance"], self.dispatches),
            ("continuations", "Sequences that went on elsewhere.", ["reason"], self.continuations),
            ("discarded_chunks", "Token chunks not taken.", ["kind"], self.discarded),
            ("resends", "Questions for missing tokens.", ["result"], self.resends),
            ("tags", "Questions for the expected length.", ["result"], self.tags),
        ):
            family = CounterMetricFamily(f"millrace_ingress_{name}", text, labels=labels)
            for values, count in counter.counts.items():
                family.add_metric(list(values), count)
            yield family
        for name, text, count in (
            ("prompt_tokens", "Prompt tokens of accepted calls.", self.prompt_tokens),
            ("cached_tokens", "Prompt tokens found in prefix caches.", self.cached_tokens),
            ("output_tokens", "Output tokens relayed.", self.output_tokens),
        ):
            yield CounterMetricFamily(f"millrace_ingress_{name}", text, value=count)

    def _gauges(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("millrace_ingress_calls_open", "Calls open now.", value=self.calls_open)
        yield GaugeMetricFamily("millrace_ingress_sequences_open", "Sequences open now.", value=self.sequences_open)
        yield GaugeMetricFamily(
            "millrace_ingress_sequences_waiting", "Sequences that wait for an instance.", value=self.sequences_waiting
        )
