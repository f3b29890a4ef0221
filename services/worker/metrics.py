"""Metrics of a worker: plain figures kept by the actor, and the collector that exposes them to Prometheus.

The actor uses no metrics library. It counts into WorkerFigures; the collector reads them when Prometheus asks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from millrace.actor.engine import EngineSnapshot
from millrace.actor.histograms import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from services.worker.state import Held

#: Upper bounds in seconds: from one cached step of a tiny model to a long queue.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class WorkerFigures:
    """Everything a worker counts since its start."""

    def __init__(self) -> None:
        self.accepted = 0
        self.refused: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self.returned: Counter[str] = Counter()
        self.repeated_submits = 0
        self.cancelled = 0
        self.orphans = 0
        self.expired = 0
        self.late_outputs = 0
        self.output_tokens = 0
        self.token_messages = 0
        self.resends = 0
        self.repeated_chunks = 0
        self.queue = Histogram(SECONDS)
        self.prefill = Histogram(SECONDS)
        self.step = Histogram(SECONDS)
        self.frozen = Histogram(SECONDS)
        self.leases = 0
        self.leases_lost = 0
        self.leases_expired = 0
        self.freezes = 0
        self.thaws = 0
        self.moved = 0
        self.arrived = 0
        self.recomputes = 0
        self.reservations = 0
        self.reservations_expired = 0
        self.pulls = 0
        self.pulled_bytes = 0
        self.copy_failures = 0
        self.replicas = 0
        self.replicas_yielded = 0
        self.replicas_expired = 0
        self.replicas_missed = 0
        self.replica_resumes = 0
        self.replica_tokens = 0
        self.replica_tail_tokens = 0
        self.kv_refused: Counter[str] = Counter()

    def first_token(self, held: Held) -> None:
        """Notes queue and prefill time of a sequence whose first token has just come."""
        scheduled_ns = held.scheduled_ns or held.first_token_ns
        self.queue.observe(max(0, scheduled_ns - held.received_ns) / 1e9)
        self.prefill.observe(max(0, held.first_token_ns - scheduled_ns) / 1e9)

    def stepped(self, before: EngineSnapshot, after: EngineSnapshot) -> None:
        """Notes the duration of a new step."""
        if after.step > before.step:
            self.step.observe(after.step_duration_ns / 1e9)

    def plain(self) -> dict[str, Any]:
        """Counts without the histograms."""
        skipped = ("queue", "prefill", "step", "frozen")
        return {k: dict(v) if isinstance(v, Counter) else v for k, v in vars(self).items() if k not in skipped}


_COUNTERS = {
    "accepted": "Sequences taken",
    "repeated_submits": "Submits of a sequence and epoch already held",
    "cancelled": "Live sequences cancelled by their ingress",
    "orphans": "Live sequences cancelled because their ingress is gone",
    "expired": "Live sequences ended at their deadline",
    "late_outputs": "Engine outputs for sequences no longer held",
    "output_tokens": "Tokens generated",
    "token_messages": "Token messages sent",
    "resends": "Resend requests answered with tokens",
    "repeated_chunks": "Chunks sent again after an outage of the bus",
    "leases": "Sequences leased to a migration",
    "leases_lost": "Leases whose sequence was preempted or ended",
    "leases_expired": "Leases that were not renewed or ended in time",
    "freezes": "Sequences stopped for a migration",
    "thaws": "Frozen sequences that decoded on because their deadline had come",
    "moved": "Sequences that moved away with their KV",
    "arrived": "Sequences that came by migration",
    "recomputes": "Sequences that came by migration without their reservation: all of their KV was computed",
    "reservations": "Reservations given to migrations",
    "reservations_expired": "Reservations that ended without news",
    "pulls": "Reads of other instances' KV",
    "pulled_bytes": "Bytes of KV read from other instances before the last round",
    "copy_failures": "Reads of other instances' KV that failed or did not match their checksums",
    "replicas": "KV replicas begun for other instances' sequences",
    "replicas_yielded": "KV replicas that the engine gave up because something else needed their blocks, once noticed",
    "replicas_expired": "KV replicas that ended without news of their source",
    "replicas_missed": "Continuations sent here for a KV replica that was gone, or of no use: all KV was computed",
    "replica_resumes": "Continuations that began on a KV replica",
    "replica_tokens": "Tokens whose KV these had from the replica",
    "replica_tail_tokens": "Tokens that these had to compute: those behind the replica",
}
_LABELLED = {
    "refused": ("reason", "Sequences refused"),
    "finished": ("reason", "Sequences ended in the engine"),
    "returned": ("reason", "Live sequences handed back"),
    "kv_refused": ("reason", "Leases, freezes, reservations and reads refused"),
}
_HISTOGRAMS = {
    "queue": "Time from submission to the first batch",
    "prefill": "Time from the first batch to the first token",
    "step": "Duration of an engine step",
    "frozen": "Time that a sequence stood still for a migration",
}


class WorkerCollector:
    """Reads the figures of this process's worker actors when Prometheus asks. Register it in the worker's registry.

    Args:
        sources: Returns (instance, figures, last snapshot, sequences forgotten) of every actor.
    """

    def __init__(self, sources: Callable[[], Iterable[tuple[str, WorkerFigures, EngineSnapshot, int]]]) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        """Yields every metric family once, with one sample per instance."""
        sources = list(self._sources())
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(f"millrace_worker_{name}", text, labels=["instance"])
            for instance, figures, _, _ in sources:
                counter.add_metric([instance], getattr(figures, name))
            yield counter
        for name, (label, text) in _LABELLED.items():
            counter = CounterMetricFamily(f"millrace_worker_{name}", text, labels=["instance", label])
            for instance, figures, _, _ in sources:
                for value, count in getattr(figures, name).items():
                    counter.add_metric([instance, str(value)], count)
            yield counter
        for name, text in _HISTOGRAMS.items():
            histogram = HistogramMetricFamily(f"millrace_worker_{name}_seconds", text, labels=["instance"])
            for instance, figures, _, _ in sources:
                kept: Histogram = getattr(figures, name)
                histogram.add_metric([instance], buckets=kept.buckets(), sum_value=kept.sum)
            yield histogram
        yield from _snapshot_metrics(sources)


def _snapshot_metrics(sources: list[tuple[str, WorkerFigures, EngineSnapshot, int]]) -> Iterator[Metric]:
    forgotten = CounterMetricFamily(
        "millrace_worker_forgotten", "Finished sequences forgotten unacknowledged", labels=["instance"]
    )
    preemptions = CounterMetricFamily("millrace_worker_preemptions", "Preemptions in the engine", labels=["instance"])
    gauges = {
        "running": GaugeMetricFamily("millrace_worker_running", "Sequences in the running batch", labels=["instance"]),
        "waiting": GaugeMetricFamily("millrace_worker_waiting", "Sequences in the queue", labels=["instance"]),
        "free": GaugeMetricFamily("millrace_worker_blocks_free", "Free KV blocks", labels=["instance"]),
        "total": GaugeMetricFamily("millrace_worker_blocks_total", "KV blocks", labels=["instance"]),
    }
    for instance, _, snapshot, count in sources:
        forgotten.add_metric([instance], count)
        preemptions.add_metric([instance], snapshot.preemptions)
        gauges["running"].add_metric([instance], len(snapshot.running))
        gauges["waiting"].add_metric([instance], len(snapshot.waiting))
        gauges["free"].add_metric([instance], snapshot.blocks_free)
        gauges["total"].add_metric([instance], snapshot.blocks_total)
    yield forgotten
    yield preemptions
    yield from gauges.values()
