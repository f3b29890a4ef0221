"""Metrics of a migrator: plain figures that the actor updates and Prometheus reads on each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from millrace.actor.metric_set import MetricSet
from millrace.contracts.migration import MigrationFinished, MigrationOutcome
from prometheus_client.registry import CollectorRegistry

#: Seconds that no token was decoded: a fast step, to the longest freeze.
GAP_S = (0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.012, 0.016, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0)
#: Seconds of a whole migration.
DURATION_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class MigratorMetrics(MetricSet):
    """All of one migrator.

    Attributes:
        instances: Yields (instance, migrations under way, sequences that stand still, sequences with a replica).
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        super().__init__("millrace_migrator", registry)
        self.instances: Callable[[], Iterable[tuple[str, int, int, int]]] = list
        text = "Migrations away from here that ended, by outcome, who wanted them, and why they did not move."
        self.finished = self.counter("migrations", text, "outcome", "reason", "refusal")
        self.bytes = self.counter("bytes", "Bytes copied in rounds, by copier.", "copier")
        self.descriptors = self.counter("descriptors", "Pieces copied in rounds, by copier.", "copier")
        text = "Rounds of KV replicas that ended early."
        self.replica_refusals = self.counter("replica_refusals", text, "refusal")
        self.gap = self.latency("gap", "Time without a token, of migrations that moved.", GAP_S)
        self.duration = self.latency("duration", "Whole migrations that moved.", DURATION_S)
        self.rounds = self.replica_bytes = 0
        self.total("rounds", "Rounds before the freeze, of migrations that moved.")
        self.total("replica_bytes", "Bytes copied into KV replicas elsewhere.")
        self.gauges("in_flight", "Migrations under way.", "instance", read=lambda: self._column(1))
        text = "Sequences that stand still now, for a target to take them."
        self.gauges("frozen", text, "instance", read=lambda: self._column(2))
        text = "Sequences that have a KV replica at another instance."
        self.gauges("replicas", text, "instance", read=lambda: self._column(3))

    def _column(self, index: int) -> list[tuple[str, Any]]:
        return [(row[0], row[index]) for row in self.instances()]

    def finish(self, body: MigrationFinished) -> None:
        self.finished.add(str(body.outcome), str(body.reason), str(body.refusal or ""))
        cost = body.cost
        if cost.copier:
            self.bytes.add(cost.copier, by=cost.bytes)
            self.descriptors.add(cost.copier, by=cost.descriptors)
        if body.outcome is MigrationOutcome.MOVED:
            self.gap.observe(cost.frozen_ns)
            self.duration.observe(cost.duration_ns)
            self.rounds += cost.rounds
