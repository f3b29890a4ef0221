"""Metrics of a broker: plain figures that the actor updates and Prometheus reads on each scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry


class BrokerMetrics(Collector):
    """All of one broker.

    Attributes:
        asks: Asks by reason.
        bids: Bids and refusals to bid, given by our instances: ``bid`` or the reason.
        ended: Sequences of our instances that were asked for and are over, by (reason, how): ``moved``, ``no_bids``,
            ``stays``, or why not.
        refused: Messages that were refused and changed nothing, by reason.
        returned: Sequences without KV that a worker was asked to hand back.
        boundaries: Rounds of boundaries that are kept here, by ``moved`` or ``stays``.
        open_asks: Yields (instance, direction, count): sequences asked for or moved, and bids that hold.
        memory_risks: Yields (instance, probability).
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.asks: Counter[str] = Counter()
        self.bids: Counter[str] = Counter()
        self.ended: Counter[tuple[str, str]] = Counter()
        self.refused: Counter[str] = Counter()
        self.boundaries: Counter[str] = Counter()
        self.returned = 0
        self.open_asks: Callable[[], Iterable[tuple[str, str, int]]] = list
        self.memory_risks: Callable[[], Iterable[tuple[str, float]]] = list
        if registry is not None:
            registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """Nothing ahead of the first scrape."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Families for one scrape."""
        for name, text, label, counts in (
            ("asks", "Asks for a running sequence to move, by reason.", "reason", self.asks),
            ("bids", "Answers of our instances to asks: bid, or why not.", "answer", self.bids),
            ("refused", "Messages that were refused and changed nothing, by reason.", "why", self.refused),
            ("boundaries", "Rounds of boundaries kept here: moved or stays.", "result", self.boundaries),
        ):
            family = CounterMetricFamily(f"millrace_broker_{name}", text, labels=[label])
            for value, count in counts.items():
                family.add_metric([value], count)
            yield family
        ended = CounterMetricFamily(
            "millrace_broker_ended",
            "Sequences asked for that are over, by reason and how.",
            labels=["reason", "result"],
        )
        for labels, count in self.ended.items():
            ended.add_metric(list(labels), count)
        yield ended
        yield CounterMetricFamily(
            "millrace_broker_returned", "Queued sequences that a worker was asked to hand back.", value=self.returned
        )
        gauge = GaugeMetricFamily(
            "millrace_broker_open",
            "Sequences asked for or moved (out), and bids that hold (in).",
            labels=["instance", "direction"],
        )
        for instance, direction, count in self.open_asks():
            gauge.add_metric([instance, direction], count)
        yield gauge
        text = "Probability that KV blocks run short within three times a move's duration."
        risks = GaugeMetricFamily("millrace_broker_memory_risk", text, labels=["instance"])
        for instance, risk in self.memory_risks():
            risks.add_metric([instance], risk)
        yield risks
