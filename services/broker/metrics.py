"""Metrics of a broker: plain figures that the actor updates and Prometheus reads on each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from millrace.actor.metric_set import MetricSet
from prometheus_client.registry import CollectorRegistry


class BrokerMetrics(MetricSet):
    """All of one broker.

    Attributes:
        ended: By reason and how: ``moved``, ``no_bids``, ``stays``, or why not.
        instances: Yields (instance, asks and moves, bids that hold, risk that memory runs short).
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        super().__init__("millrace_broker", registry)
        self.instances: Callable[[], Iterable[tuple[str, int, int, float]]] = list
        self.asks = self.counter("asks", "Asks for a running sequence to move, by reason.", "reason")
        self.bids = self.counter("bids", "Answers of our instances to asks: bid, or why not.", "answer")
        self.refused = self.counter("refused", "Messages that were refused and changed nothing, by reason.", "why")
        self.boundaries = self.counter("boundaries", "Rounds of boundaries kept here: moved or stays.", "result")
        self.ended = self.counter("ended", "Sequences asked for that are over, by reason and how.", "reason", "result")
        self.returned = 0
        self.total("returned", "Queued sequences that a worker was asked to hand back.")
        text = "Sequences asked for or moved (out), and bids that hold (in)."
        self.gauges("open", text, "instance", "direction", read=self._open)
        text = "Probability that KV blocks run short within three times a move's duration."
        self.gauges("memory_risk", text, "instance", read=lambda: [(row[0], row[3]) for row in self.instances()])

    def _open(self) -> list[tuple[str, str, int]]:
        rows = list(self.instances())
        return [(row[0], "out", row[1]) for row in rows] + [(row[0], "in", row[2]) for row in rows]
