"""Counters of a runtime: plain integers on the hot path, turned into Prometheus families at each scrape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

#: One handled message in this many is timed: two clock readings cost as much as a small handler.
SAMPLE_EVERY = 64

_BUCKETS_S = (2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.25, 1.0)


class RuntimeMeter:
    """Counters of one runtime. Keys are small closed sets, so nothing grows with traffic.

    Attributes:
        handled: (actor, message type) -> messages handled.
        refused: (actor, kind) -> messages not handed to the actor; kind is ``too_large``, ``undecodable``,
            ``invalid``, ``unexpected``, ``reply`` (wants its answer elsewhere than in an inbox) or ``stored`` (a value
            of a bucket).
        dropped: what (``disconnected``, ``behind``, ``too_large``, ``late_reply``) -> messages not sent or answers
            that came too late.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.handled: dict[tuple[str, str], int] = {}
        self.refused: dict[tuple[str, str], int] = {}
        self.dropped: dict[str, int] = {}
        self.disconnects = 0
        self.connected = False
        self.handle_seconds = Histogram(
            "millrace_actor_handle_seconds",
            f"Time of one Actor.handle call; one in {SAMPLE_EVERY} is measured.",
            ["actor"],
            buckets=_BUCKETS_S,
            registry=registry,
        )
        registry.register(self)

    def count_handled(self, actor: str, type_name: str) -> None:
        key = (actor, type_name)
        self.handled[key] = self.handled.get(key, 0) + 1

    def count_refused(self, actor: str, kind: str) -> None:
        key = (actor, kind)
        self.refused[key] = self.refused.get(key, 0) + 1

    def count_dropped(self, what: str) -> None:
        self.dropped[what] = self.dropped.get(what, 0) + 1

    def collect(self) -> Iterator[Metric]:
        """Prometheus calls this for each scrape."""
        handled = CounterMetricFamily("millrace_actor_handled", "Messages handled.", labels=["actor", "type"])
        for (actor, type_name), count in list(self.handled.items()):
            handled.add_metric([actor, type_name], count)
        yield handled
        refused = CounterMetricFamily(
            "millrace_actor_refused", "Messages that never reached the actor.", labels=["actor", "kind"]
        )
        for (actor, kind), count in list(self.refused.items()):
            refused.add_metric([actor, kind], count)
        yield refused
        dropped = CounterMetricFamily("millrace_bus_dropped", "Messages not sent, answers too late.", labels=["what"])
        for what, count in list(self.dropped.items()):
            dropped.add_metric([what], count)
        yield dropped
        yield CounterMetricFamily("millrace_bus_disconnects", "Lost connections to NATS.", value=self.disconnects)
        yield GaugeMetricFamily("millrace_bus_connected", "1 while connected to NATS.", value=float(self.connected))
