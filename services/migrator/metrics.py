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
        evacuated: Sequences of evacuations, by ``moved`` and ``failed``.
        handoff_pauses: Times that an instance stopped handing off for a while, by the refusal that it met.
        handoff_pauses_cut: Those that ended early, because room was heard of.
        in_flight: Yields (instance, direction, count) for gauges.
        frozen: Yields (instance, count): sequences that stand still for a target to take them.
        resting: Yields (instance, count): sequences whose handoff is tried again later.
        replica_bytes, replica_rounds: Copied for KV replicas, and in how many pulls.
        replica_refusals: What ended a round of one, by refusal.
        replicas: Yields (instance, count): sequences with a KV replica elsewhere.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.finished: Counter[tuple[str, str, str]] = Counter()
        self.bytes: Counter[str] = Counter()
        self.descriptors: Counter[str] = Counter()
        self.evacuated: Counter[str] = Counter()
        self.handoff_pauses: Counter[str] = Counter()
        self.handoff_pauses_cut = 0
        self.gap = Histogram(GAP_S)
        self.duration = Histogram(DURATION_S)
        self.rounds = 0
        self.in_flight: Callable[[], Iterable[tuple[str, str, int]]] = list
        self.frozen: Callable[[], Iterable[tuple[str, int]]] = list
        self.resting: Callable[[], Iterable[tuple[str, int]]] = list
        self.replica_bytes = self.replica_rounds = 0
        self.replica_refusals: Counter[str] = Counter()
        self.replicas: Callable[[], Iterable[tuple[str, int]]] = list
        if registry is not None:
            registry.register(self)

    def finish(self, body: MigrationFinished) -> None:
        """A migration away ended."""
        self.finished[(str(body.outcome), str(body.reason), str(body.refusal or ""))] += 1
        if body.copier:
            self.bytes[body.copier] += body.bytes
            self.descriptors[body.copier] += body.descriptors
        if body.outcome is MigrationOutcome.MOVED:
            self.gap.observe(body.frozen_ns / _NS)
            self.duration.observe(body.duration_ns / _NS)
            self.rounds += body.rounds

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
            "millrace_migrator_handoff_pauses_cut",
            "Pauses of handoffs that ended early, because an instance reported room.",
            value=self.handoff_pauses_cut,
        )
        yield CounterMetricFamily(
            "millrace_migrator_replica_bytes", "Bytes copied into KV replicas elsewhere.", value=self.replica_bytes
        )
        yield CounterMetricFamily(
            "millrace_migrator_replica_rounds", "Pulls of KV replicas elsewhere.", value=self.replica_rounds
        )
        flying = GaugeMetricFamily(
            "millrace_migrator_in_flight",
            "Migrations under way, and those that wait.",
            labels=["instance", "direction"],
        )
        for instance, direction, count in self.in_flight():
            flying.add_metric([instance, direction], count)
        yield flying
        yield from self._by_instance()

    def _by_instance(self) -> Iterator[Metric]:
        for name, text, rows in (
            ("frozen", "Sequences that stand still now, for a target to take them.", self.frozen()),
            ("handoffs_resting", "Sequences whose handoff no instance took, to be tried again later.", self.resting()),
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
            ("evacuated", "Sequences of evacuations, by how their migrations ended.", "result", self.evacuated),
            (
                "handoff_pauses",
                "Times that an instance stopped handing off for a while, by the refusal that it met.",
                "refusal",
                self.handoff_pauses,
            ),
        ):
            family = CounterMetricFamily(f"millrace_migrator_{name}", text, labels=[label])
            for value, count in counts.items():
                family.add_metric([value], count)
            yield family
