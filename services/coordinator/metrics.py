"""Metrics of provisioning and the autopilot: figures that actors update and Prometheus reads on each scrape."""

from __future__ import annotations

from millrace.actor.metric_set import MetricSet
from millrace.policies.provisioning import ProvisioningDecision, ProvisioningView
from prometheus_client.registry import CollectorRegistry


class ProvisioningMetrics(MetricSet):
    """All of one coordinator. ``models``: view and decision at the last look, of models whose lease is held."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        super().__init__("millrace_provisioning", registry)
        self.models: dict[str, tuple[ProvisioningView, ProvisioningDecision]] = {}
        text = "Orders to provisioners by how they ended: done, late, unanswered, or the reason of a refusal."
        self.orders = self.counter("orders", text, "action", "outcome")
        text = "Instances as provisioning counts them, by state."
        self.gauges("instances", text, "model", "state", read=self._states)
        self.gauges("signal_seconds", "Latency compared with the threshold.", "model", read=self._signals)
        self.gauges("utilisation_ratio", "Mean load of the serving instances.", "model", read=self._utilisations)

    def _states(self) -> list[tuple[str, str, int]]:
        rows: list[tuple[str, str, int]] = []
        for model, (view, _) in self.models.items():
            rows += [(model, "serving", len(view.serving)), (model, "absent", view.absent)]
            rows += [(model, "starting", view.starting), (model, "stopping", view.stopping)]
        return rows

    def _signals(self) -> list[tuple[str, float]]:
        told = [(model, decision.signal_ns) for model, (_, decision) in self.models.items()]
        return [(model, signal_ns / 1e9) for model, signal_ns in told if signal_ns is not None]

    def _utilisations(self) -> list[tuple[str, float]]:
        return [(model, decision.utilisation) for model, (_, decision) in self.models.items()]


class AutopilotMetrics(MetricSet):
    """All of one coordinator."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        super().__init__("millrace_autopilot", registry)
        self.cpu_seconds = 0.0
        self.total("cpu_seconds", "Processor time of replays with other settings.")
        self.replays = self.counter("replays", "Replays by what they said.", "outcome")
