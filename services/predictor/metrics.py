"""Metrics of a predictor: plain figures that the actor updates and Prometheus reads on each scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from millrace.actor.histograms import LatencyHistogram
from millrace.contracts.observers import RequestFinished
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

_NS = 1e9
#: Seconds: a forecast of an idle engine, to one in Python of a full one.
_HANDLING_S = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)
#: Seconds: one step, to the age at which nothing is answered any more.
_AGE_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
#: Seconds that a prediction was off: less than a step, to a queue that nobody expected.
_ERROR_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class Labelled(Counter[str]):
    """Counts by one label out of a closed set."""

    def add(self, label: str) -> None:
        """One more."""
        self[label] += 1


class Error:
    """Error of the predictions of one figure.

    Attributes:
        absolute: Differences without sign.
        share: Sum of differences over the real values: divided by ``judged``, the mean absolute percentage error.
        bias_ns: Sum of real less predicted, ns.
    """

    def __init__(self) -> None:
        self.absolute = LatencyHistogram(_ERROR_S)
        self.judged = 0
        self.share = 0.0
        self.bias_ns = 0

    def observe(self, *, predicted_ns: int, real_ns: int) -> None:
        """Judges one prediction."""
        self.judged += 1
        self.absolute.observe(abs(real_ns - predicted_ns))
        self.share += abs(real_ns - predicted_ns) / max(1, real_ns)
        self.bias_ns += real_ns - predicted_ns


class PredictorMetrics(Collector):
    """All of one predictor. The actor bumps them; only ``clock`` and ``instances`` come from its shell.

    Attributes:
        predictions: By result: ``predicted``, ``malformed`` or the reason why not.
        snapshots: By what became of them: ``taken``, ``repeated``, ``unregistered`` or why they were refused.
        placements: By how they went: ``shown``, ``ended``, ``moved``, ``expired``, ``full``, ``unusable``.
        outcomes: Requests that ended, by outcome.
        remembered: Questions answered without a new forecast.
        loads: Snapshots that were rolled forward anew; further questions go on from there.
        snapshot_age: Of snapshots that were rolled forward.
        handling: Time from a question's handling to its answer.
        errors: By figure: ``ttft`` and ``e2e``.
        prefix_tokens: Prompt tokens of requests that ended: ``believed`` to be cached when they were placed, ``found``
            in the cache; of the former ``missing`` ones, of the latter ``unexpected`` ones.
        missing_sets: Instances registered whose step-time set is not here.
        clock: Counts nanoseconds; a constant where nobody measures.
        instances: Yields (name, scale, fits, cached blocks) of every instance, for gauges.
    """

    def __init__(self, registry: CollectorRegistry | None = None, *, clock: Callable[[], int] = int) -> None:
        self.predictions = Labelled()
        self.snapshots = Labelled()
        self.placements = Labelled()
        self.outcomes = Labelled()
        self.prefix_tokens = Labelled()
        self.remembered = 0
        self.loads = 0
        self.missing_sets = 0
        self.snapshot_age = LatencyHistogram(_AGE_S)
        self.handling = LatencyHistogram(_HANDLING_S)
        self.errors = {"ttft": Error(), "e2e": Error()}
        self.clock = clock
        self.instances: Callable[[], Iterable[tuple[str, float, int, int]]] = list
        if registry is not None:
            registry.register(self)

    def judge(self, outcome: RequestFinished) -> None:
        """Compares what was predicted at the first placement with what came of it."""
        before_ns = outcome.placed_ns - outcome.arrival_ns
        for figure, predicted_ns, since_arrival_ns in (
            ("ttft", outcome.predicted_ttft_ns, outcome.ttft_ns),
            ("e2e", outcome.predicted_e2e_ns, outcome.e2e_ns),
        ):
            if predicted_ns is not None and since_arrival_ns is not None and since_arrival_ns > before_ns >= 0:
                self.errors[figure].observe(predicted_ns=predicted_ns, real_ns=since_arrival_ns - before_ns)

    def judge_prefix(self, *, believed: int, found: int) -> None:
        """Counts one prompt's tokens."""
        self.prefix_tokens["believed"] += believed
        self.prefix_tokens["found"] += found
        self.prefix_tokens["missing"] += max(0, believed - found)
        self.prefix_tokens["unexpected"] += max(0, found - believed)

    def describe(self) -> Iterable[Metric]:
        """Nothing ahead of the first scrape."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Families for one scrape."""
        yield from self._counters()
        yield from self._histograms()
        yield from self._errors()
        yield from self._gauges()

    def _counters(self) -> Iterator[Metric]:
        for name, text, label, counts in (
            ("predictions", "Questions, by result.", "result", self.predictions),
            ("snapshots", "Snapshots received, by result.", "result", self.snapshots),
            ("placements", "Placements that no snapshot showed yet, by how they went.", "result", self.placements),
            ("outcomes", "Requests that ended, by outcome.", "outcome", self.outcomes),
            ("prefix_tokens", "Prompt tokens believed to be cached, and found.", "kind", self.prefix_tokens),
        ):
            family = CounterMetricFamily(f"millrace_predictor_{name}", text, labels=[label])
            for value, count in counts.items():
                family.add_metric([value], count)
            yield family
        for name, text, count in (
            ("remembered", "Questions answered from memory.", self.remembered),
            ("loads", "Snapshots that a simulation was started from.", self.loads),
            ("missing_sets", "Registrations whose step-time set is not here.", self.missing_sets),
        ):
            yield CounterMetricFamily(f"millrace_predictor_{name}", text, value=count)

    def _histograms(self) -> Iterator[Metric]:
        for name, text, histogram in (
            ("snapshot_age", "Age of the snapshot that a forecast started from.", self.snapshot_age),
            ("handling", "Time from a question's handling to its answer.", self.handling),
        ):
            family = HistogramMetricFamily(f"millrace_predictor_{name}_seconds", text)
            family.add_metric([], histogram.buckets(), histogram.sum_s())
            yield family

    def _errors(self) -> Iterator[Metric]:
        absolute = HistogramMetricFamily(
            "millrace_predictor_error_seconds", "Real less predicted latency, without sign.", labels=["figure"]
        )
        share = CounterMetricFamily(
            "millrace_predictor_error_share", "Sum of errors, each over the real value.", labels=["figure"]
        )
        bias = GaugeMetricFamily(
            "millrace_predictor_bias_seconds", "Mean of real less predicted latency.", labels=["figure"]
        )
        for figure, error in self.errors.items():
            absolute.add_metric([figure], error.absolute.buckets(), error.absolute.sum_s())
            share.add_metric([figure], error.share)
            bias.add_metric([figure], error.bias_ns / _NS / max(1, error.judged))
        yield from (absolute, share, bias)

    def _gauges(self) -> Iterator[Metric]:
        scale = GaugeMetricFamily(
            "millrace_predictor_step_scale", "Measured over modelled step time.", labels=["instance"]
        )
        fits = GaugeMetricFamily(
            "millrace_predictor_step_fits", "Fits of step times where no set is known.", labels=["instance"]
        )
        cached = GaugeMetricFamily(
            "millrace_predictor_cached_blocks", "Blocks believed to be in the prefix cache.", labels=["instance"]
        )
        served = list(self.instances())
        for name, value, fitted, blocks in served:
            scale.add_metric([name], value)
            fits.add_metric([name], fitted)
            cached.add_metric([name], blocks)
        yield from (scale, fits, cached)
        yield GaugeMetricFamily("millrace_predictor_instances", "Instances served.", value=len(served))
