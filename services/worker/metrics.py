"""Metrics of a worker: plain figures kept by the actor, and the collector that exposes them to Prometheus.

The actor uses no metrics library. It counts into WorkerFigures; the collector reads them when Prometheus asks: one for
all actors of a process, as a family may stand only once in a scrape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, get_args, get_type_hints

from millrace.actor.histograms import Histogram
from millrace.contracts.status import EngineSnapshot
from millrace.telemetry.vllm_engines import EngineFigures, engine_families
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from services.worker.state import Held

#: Upper bounds in seconds: from one cached step of a tiny model to a long queue.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


def _seconds() -> Histogram:
    return Histogram(SECONDS)


@dataclass
class WorkerFigures:
    """Everything a worker counts since its start, as its metrics say it."""

    accepted: Annotated[int, "Sequences taken"] = 0
    orphans: Annotated[int, "Live sequences cancelled because their ingress is gone"] = 0
    expired: Annotated[int, "Live sequences ended at their deadline"] = 0
    late_outputs: Annotated[int, "Engine outputs for sequences no longer held"] = 0
    output_tokens: Annotated[int, "Tokens generated"] = 0
    token_messages: Annotated[int, "Token messages sent"] = 0
    leases_lost: Annotated[int, "Leases whose sequence was preempted or ended"] = 0
    leases_expired: Annotated[int, "Leases that were not renewed or ended in time"] = 0
    thaws: Annotated[int, "Frozen sequences that decoded on because their deadline had come"] = 0
    recomputes: Annotated[
        int, "Sequences that came by migration without their reservation: all of their KV was computed"
    ] = 0
    reservations_expired: Annotated[int, "Reservations that ended without news"] = 0
    replicas_yielded: Annotated[
        int, "KV replicas that the engine gave up because something else needed their blocks, once noticed"
    ] = 0
    replicas_expired: Annotated[int, "KV replicas that ended without news of their source"] = 0
    replicas_missed: Annotated[
        int, "Continuations sent here for a KV replica that was gone, or of no use: all KV was computed"
    ] = 0
    refused: Annotated[Counter[str], "Sequences refused"] = field(default_factory=Counter)
    finished: Annotated[Counter[str], "Sequences ended in the engine"] = field(default_factory=Counter)
    returned: Annotated[Counter[str], "Live sequences handed back"] = field(default_factory=Counter)
    kv_refused: Annotated[Counter[str], "Leases, freezes, reservations and reads refused"] = field(
        default_factory=Counter
    )
    queue: Annotated[Histogram, "Time from submission to the first batch"] = field(default_factory=_seconds)
    prefill: Annotated[Histogram, "Time from the first batch to the first token"] = field(default_factory=_seconds)
    step: Annotated[Histogram, "Duration of an engine step"] = field(default_factory=_seconds)
    frozen: Annotated[Histogram, "Time that a sequence stood still for a migration"] = field(default_factory=_seconds)

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
        values = {name: value for name, value in vars(self).items() if not isinstance(value, Histogram)}
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in values.items()}


class WorkerCollector:
    """Reads the figures of this process's worker actors when Prometheus asks. Register it in the worker's registry.

    Args:
        sources: Returns (instance, figures, last snapshot, sequences forgotten) of every actor.
    """

    def __init__(
        self, sources: Callable[[], Iterable[tuple[str, WorkerFigures, EngineSnapshot, int]]], model: str = ""
    ) -> None:
        self._sources = sources
        self._model = model

    def collect(self) -> Iterator[Metric]:
        """Yields every metric family once, with one sample per instance."""
        sources = list(self._sources())
        for name, declared in get_type_hints(WorkerFigures, include_extras=True).items():
            kind, text = get_args(declared)
            rows = [(instance, getattr(figures, name)) for instance, figures, _, _ in sources]
            yield _family(name, text, kind, rows)
        yield from _snapshot_metrics(sources)
        yield from _vllm_metrics(sources, self._model)


def _family(name: str, text: str, kind: Any, rows: list[tuple[str, Any]]) -> Metric:
    """One figure of every actor. ``kind``: its type."""
    if kind is Histogram:
        histogram = HistogramMetricFamily(f"millrace_worker_{name}_seconds", text, labels=["instance"])
        for instance, kept in rows:
            histogram.add_metric([instance], buckets=kept.buckets(), sum_value=kept.sum)
        return histogram
    labels = ["instance"] if kind is int else ["instance", "reason"]
    counter = CounterMetricFamily(f"millrace_worker_{name}", text, labels=labels)
    for instance, figure in rows:
        if kind is int:
            counter.add_metric([instance], figure)
            continue
        for reason, count in figure.items():
            counter.add_metric([instance, str(reason)], count)
    return counter


#: Figures of the last snapshot.
_GAUGES: dict[str, tuple[str, Callable[[EngineSnapshot], int]]] = {
    "running": ("Sequences in the running batch", lambda snapshot: len(snapshot.running)),
    "waiting": ("Sequences in the queue", lambda snapshot: len(snapshot.waiting)),
    "blocks_free": ("Free KV blocks", lambda snapshot: snapshot.blocks_free),
    "blocks_total": ("KV blocks", lambda snapshot: snapshot.blocks_total),
}


def _snapshot_metrics(sources: list[tuple[str, WorkerFigures, EngineSnapshot, int]]) -> Iterator[Metric]:
    text = "Finished sequences forgotten unacknowledged"
    yield _family("forgotten", text, int, [(row[0], row[3]) for row in sources])
    preempted = [(instance, snapshot.preemptions) for instance, _, snapshot, _ in sources]
    yield _family("preemptions", "Preemptions in the engine", int, preempted)
    for name, (text, read) in _GAUGES.items():
        gauge = GaugeMetricFamily(f"millrace_worker_{name}", text, labels=["instance"])
        for instance, _, snapshot, _ in sources:
            gauge.add_metric([instance], read(snapshot))
        yield gauge


def _vllm_metrics(sources: list[tuple[str, WorkerFigures, EngineSnapshot, int]], model: str) -> Iterator[Metric]:
    """Engines' figures under vLLM's names; ingress tells those of requests (vllm_metrics.py)."""
    return engine_families(
        EngineFigures(
            model,
            instance,
            len(snapshot.running),
            len(snapshot.waiting),
            snapshot.blocks_free,
            snapshot.blocks_total,
            snapshot.preemptions,
            figures.output_tokens,
            snapshot.totals,
        )
        for instance, figures, snapshot, _ in sources
    )
