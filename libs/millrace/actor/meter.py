"""Metrics of a runtime."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram

from millrace.actor.metric_set import MetricSet

#: One handled message in this many is timed: two clock readings cost as much as a small handler.
SAMPLE_EVERY = 64

_BUCKETS_S = (2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.25, 1.0)
#: Series of one metric: each message type at each of a process's actors.
_SERIES_MAX = 100_000


class RuntimeMeter(MetricSet):
    """Counters of one runtime. Labels are small closed sets, so nothing grows with traffic.

    Attributes:
        refused: Messages not handed to the actor; kind is ``too_large``, ``undecodable``, ``invalid``, ``unexpected``,
            ``reply`` (wants its answer elsewhere than in an inbox) or ``stored`` (a value of a bucket).
        dropped: Messages not sent, or answers that came too late: ``disconnected``, ``behind``, ``too_large``,
            ``late_reply``, ``permission``, ``bus_error``.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__("millrace", registry)
        self.handle_seconds = Histogram(
            "millrace_actor_handle_seconds",
            f"Time of one Actor.handle call; one in {SAMPLE_EVERY} is measured.",
            ["actor"],
            buckets=_BUCKETS_S,
            registry=registry,
        )
        self.handled = self.counter("actor_handled", "Messages handled.", "actor", "type", series_max=_SERIES_MAX)
        text = "Messages that never reached the actor."
        self.refused = self.counter("actor_refused", text, "actor", "kind", series_max=_SERIES_MAX)
        self.dropped = self.counter("bus_dropped", "Messages not sent, answers too late.", "what")
        self.bus_disconnects = 0
        self.total("bus_disconnects", "Lost connections to NATS.")
        self.connected = False
        self.gauge("bus_connected", "1 while connected to NATS.", lambda: float(self.connected))
