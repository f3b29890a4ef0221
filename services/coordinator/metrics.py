"""Metrics of the coordinator, and the collector that exposes them to Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


@dataclass
class ModelFigures:
    """One model at the last look.

    Attributes:
        states: serving, absent, starting, stopping -> instances.
        signal_s: Latency that was compared with the threshold; None where there is none.
    """

    states: dict[str, int] = field(default_factory=dict)
    signal_s: float | None = None
    utilisation: float = 0.0


@dataclass
class ProvisioningFigures:
    """Everything counted since the start.

    Attributes:
        decisions: (model, action) -> decisions.
        orders: (action, outcome) -> orders to provisioners by how they ended.
        models: Those whose lease is held.
    """

    decisions: Counter[tuple[str, str]] = field(default_factory=Counter)
    orders: Counter[tuple[str, str]] = field(default_factory=Counter)
    models: dict[str, ModelFigures] = field(default_factory=dict)


class CoordinatorCollector:
    """Reads the figures when Prometheus asks."""

    def __init__(self, figures: ProvisioningFigures) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        """Prometheus calls this for each scrape."""
        figures = self._figures
        decisions = CounterMetricFamily(
            "millrace_provisioning_decisions", "Decisions to start or stop instances.", labels=["model", "action"]
        )
        for (model, action), count in list(figures.decisions.items()):
            decisions.add_metric([model, action], count)
        yield decisions
        orders = CounterMetricFamily(
            "millrace_provisioning_orders",
            "Orders to provisioners by how they ended: done, late, unanswered, or the reason of a refusal.",
            labels=["action", "outcome"],
        )
        for (action, outcome), count in list(figures.orders.items()):
            orders.add_metric([action, outcome], count)
        yield orders
        yield from self._gauges()

    def _gauges(self) -> Iterator[Metric]:
        instances = GaugeMetricFamily(
            "millrace_provisioning_instances",
            "Instances as provisioning counts them, by state.",
            labels=["model", "state"],
        )
        signal = GaugeMetricFamily(
            "millrace_provisioning_signal_seconds", "Latency compared with the threshold.", labels=["model"]
        )
        utilisation = GaugeMetricFamily(
            "millrace_provisioning_utilisation_ratio", "Mean load of the serving instances.", labels=["model"]
        )
        for model, figures in list(self._figures.models.items()):
            for state, count in figures.states.items():
                instances.add_metric([model, state], count)
            if figures.signal_s is not None:
                signal.add_metric([model], figures.signal_s)
            utilisation.add_metric([model], figures.utilisation)
        yield from (instances, signal, utilisation)
