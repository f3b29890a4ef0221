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
        deals: Deals away that are over, by (reason, how): ``moved``, ``no_bids``, ``stays``, or why not.
        refused: Messages that were refused and changed nothing, by reason.
        starved: Slots that were kept for a sequence that had been postponed too often.
        unheard_ends: Transfers to our instances whose end was found out by asking.
        returned: Sequences without KV that a worker was asked to hand back.
        boundaries: Rounds of boundaries that are kept here, by ``moved`` or ``stays``.
        open_deals: Yields (instance, direction, count).
        memory_risks: Yields (instance, probability).
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.asks: Counter[str] = Counter()
        self.bids: Counter[str] = Counter()
        self.deals: Counter[tuple[str, str]] = Counter()
        self.refused: Counter[str] = Counter()
        self.boundaries: Counter[str] = Counter()
        self.starved = 0
        self.unheard_ends = 0
        self.returned = 0
        self.open_deals: Callable[[], Iterable[tuple[str, str, int]]] = list
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
        deals = CounterMetricFamily(
            "millrace_broker_deals", "Deals away that are over, by reason and how.", labels=["reason", "result"]
        )
        for labels, count in self.deals.items():
            deals.add_metric(list(labels), count)
        yield deals
        yield CounterMetricFamily(
            "millrace_broker_starved", "Slots kept for a sequence that was postponed too often.", value=self.starved
        )
        yield CounterMetricFamily(
            "millrace_broker_unheard_ends",
            "Transfers whose end was found by a query (its message was lost).",
            value=self.unheard_ends,
        )
        yield CounterMetricFamily(
            "millrace_broker_returned", "Queued sequences that a worker was asked to hand back.", value=self.returned
        )
        gauge = GaugeMetricFamily("millrace_broker_open_deals", "Open deals.", labels=["instance", "direction"])
        for instance, direction, count in self.open_deals():
            gauge.add_metric([instance, direction], count)
        yield gauge
        text = "Probability that KV blocks run short within three times a move's duration."
        risks = GaugeMetricFamily("millrace_broker_memory_risk", text, labels=["instance"])
        for instance, risk in self.memory_risks():
            risks.add_metric([instance], risk)
        yield risks
