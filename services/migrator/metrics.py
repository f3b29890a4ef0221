"""Metrics of a migrator: plain figures that the actor updates and Prometheus reads on each scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from millrace.actor.histograms import Histogram
from millrace.contracts.migration import MigrationFinished, MigrationOutcome
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

#: Seconds that no token was decoded: a fast step, to the longest freeze.
GAP_S = (0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.012, 0.016, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0)
#: Seconds of a whole migration.
DURATION_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)

_NS = 1e9


class MigratorMetrics(Collector):
    """All of one migrator.

    Attributes:
        finished: Migrations away, by (outcome, reason, refusal).
        rounds: Before the freeze, of migrations that moved.
        bytes, descriptors: Copied in rounds, by copier.
        in_flight: Yields (instance, count): migrations under way.
        frozen: Yields (instance, count): sequences that stand still for a target to take them.
        replica_bytes, replica_rounds: Copied for KV replicas, and in how many pulls.
        replica_refusals: What ended a round of one, by refusal.
        replicas: Yields (instance, count): sequences with a KV replica elsewhere.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.finished: Counter[tuple[str, str, str]] = Counter()
        self.bytes: Counter[str] = Counter()
        self.descriptors: Counter[str] = Counter()
        self.gap = Histogram(GAP_S)
        self.duration = Histogram(DURATION_S)
        self.rounds = 0
        self.in_flight: Callable[[], Iterable[tuple[str, int]]] = list
        self.frozen: Callable[[], Iterable[tuple[str, int]]] = list
        self.replica_bytes = self.replica_rounds = 0
        self.replica_refusals: Counter[str] = Counter()
        self.replicas: Callable[[], Iterable[tuple[str, int]]] = list
        if registry is not None:
            registry.register(self)

    def finish(self, body: MigrationFinished) -> None:
        """A migration away ended."""
        self.finished[(str(body.outcome), str(body.reason), str(body.refusal or ""))] += 1
        cost = body.cost
        if cost.copier:
            self.bytes[cost.copier] += cost.bytes
            self.descriptors[cost.copier] += cost.descriptors
        if body.outcome is MigrationOutcome.MOVED:
            self.gap.observe(cost.frozen_ns / _NS)
            self.duration.observe(cost.duration_ns / _NS)
            self.rounds += cost.rounds

    def replicated(self, copied_bytes: int) -> None:
        """A pull into a KV replica ended."""
        self.replica_bytes += copied_bytes
        self.replica_rounds += 1

    def describe(self) -> Iterable[Metric]:
        """Nothing ahead of the first scrape."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Families for one scrape."""
        yield from self._counters()
        for name, text, histogram in (
            ("gap", "Time without a token, of migrations that moved.", self.gap),
            ("duration", "Whole migrations that moved.", self.duration),
        ):
            family = HistogramMetricFamily(f"millrace_migrator_{name}_seconds", text)
            family.add_metric([], histogram.buckets(), histogram.sum)
            yield family
        yield CounterMetricFamily(
            "millrace_migrator_rounds", "Rounds before the freeze, of migrations that moved.", value=self.rounds
        )
        yield CounterMetricFamily(
            "millrace_migrator_replica_bytes", "Bytes copied into KV replicas elsewhere.", value=self.replica_bytes
        )
        yield CounterMetricFamily(
            "millrace_migrator_replica_rounds", "Pulls of KV replicas elsewhere.", value=self.replica_rounds
        )
        yield from self._by_instance()

    def _by_instance(self) -> Iterator[Metric]:
        for name, text, rows in (
            ("in_flight", "Migrations under way.", self.in_flight()),
            ("frozen", "Sequences that stand still now, for a target to take them.", self.frozen()),
            ("replicas", "Sequences that have a KV replica at another instance.", self.replicas()),
        ):
            family = GaugeMetricFamily(f"millrace_migrator_{name}", text, labels=["instance"])
            for instance, count in rows:
                family.add_metric([instance], count)
            yield family

    def _counters(self) -> Iterator[Metric]:
        finished = CounterMetricFamily(
            "millrace_migrator_migrations",
            "Migrations away from here that ended, by outcome, who wanted them, and why they did not move.",
            labels=["outcome", "reason", "refusal"],
        )
        for labels, count in self.finished.items():
            finished.add_metric(list(labels), count)
        yield finished
        for name, text, label, counts in (
            ("bytes", "Bytes copied in rounds, by copier.", "copier", self.bytes),
            ("descriptors", "Pieces copied in rounds, by copier.", "copier", self.descriptors),
            ("replica_refusals", "Rounds of KV replicas that ended early.", "refusal", self.replica_refusals),
        ):
            family = CounterMetricFamily(f"millrace_migrator_{name}", text, labels=[label])
            for value, count in counts.items():
                family.add_metric([value], count)
            yield family
