"""Ingress's metrics: plain counters that the core bumps, read by Prometheus when it scrapes."""

from __future__ import annotations

from collections.abc import Callable

from millrace.actor.metric_set import MetricSet
from prometheus_client.registry import CollectorRegistry

from services.ingress.vllm_metrics import VllmMetrics

#: Seconds. First tokens and gaps from a modelled engine's fraction of a millisecond to an overloaded one's minute.
_SHORT_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
#: Seconds. Whole requests, to the default deadline.
_LONG_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 600.0)
#: Predicted over actual, less 1: from far too early to far too late.
_SIGNED_ERROR = (-0.8, -0.5, -0.25, -0.1, -0.05, 0.0, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0)
#: Size of that error. The issue's aim is 0.1, Block reports 0.1 to 0.15.
_ERROR = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)


class IngressMetrics(MetricSet):
    """All of one ingress. Attributes are bumped by the core on its event loop, and read there too.

    Label values: ``migrations`` are granted epochs that were ``moved``; ``rescued`` (the source was lost meanwhile, the
    target had it already); ``stayed`` (the source had gone on); ``replaced`` by a later one; ``lost`` (the target is
    gone, or has it not); ``ended`` (the sequence did, at its source); and those that were ``refused``. ``discarded``
    chunks are ``late`` (old epoch, ended or unknown sequence), ``duplicate``, ``contradiction``, ``gap``, ``unproven``
    (of a granted epoch, before its target is the owner). ``forecasts`` were ``answered``, ``unanswered`` in time,
    ``absurd``, ``outdated`` (of an earlier incarnation), ``unexpected``, or have the predictor's reason for none.
    ``judgements`` were ``answered``, ``unanswered``, ``unknown`` (no score), ``absurd`` (not within 0 to 100),
    ``unexpected``, ``paused``; each but the first leaves it to confidence.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        super().__init__("millrace_ingress", registry)
        self.vllm = VllmMetrics(registry)
        counter, latency = self.counter, self.latency
        self.ttft = latency("ttft", "Time from arrival to the first token.", _SHORT_S)
        self.itl = latency("itl", "Time between two token messages of one sequence.", _SHORT_S)
        self.e2e = latency("e2e", "Time from arrival to completion.", _LONG_S)
        self.queue = latency("queue", "Time from arrival until instances accepted the request.", _SHORT_S)
        self.gap = latency("continuation_gap", "Time without a token around a continuation.", _SHORT_S)
        self.migration_gap = latency("migration_gap", "Time without a token around a migration.", _SHORT_S)
        self.forecast_wait = latency("forecast", "Time from the question to predictors until the decision.", _SHORT_S)
        kinds = ("e2e", "ttft")
        text = "Size of (predicted - actual) / actual."
        self.errors = self.histograms("forecast_error_ratio", text, "of", kinds, _ERROR)
        text = "(predicted - actual) / actual."
        self.errors_signed = self.histograms("forecast_signed_error_ratio", text, "of", kinds, _SIGNED_ERROR)
        self.calls = counter("requests", "Calls that ended.", "model", "outcome")
        self.refusals = counter("refusals", "Calls refused or failed, by kind.", "kind")
        self.dispatches = counter("dispatches", "Sequences placed.", "policy", "instance", series_max=10_000)
        self.continuations = counter("continuations", "Sequences that continued elsewhere.", "reason")
        self.migrations = counter("migrations", "Epochs allotted to migrations, by outcome.", "outcome")
        self.discarded = counter("discarded_chunks", "Token chunks ignored.", "kind")
        self.resends = counter("resends", "Questions for missing tokens.", "result")
        self.tags = counter("tags", "Questions for the expected length.", "result")
        self.forecasts = counter("forecasts", "Candidates whose predictor was asked, by result.", "result")
        self.fallbacks = counter("fallbacks", "Placements decided by the fallback policy, by reason.", "reason")
        self.attempts = counter("attempts", "Attempts of cascades.", "cascade", "model", "outcome")
        text = "Answers of cascades not delivered, by reason."
        self.escalations = counter("escalations", text, "cascade", "reason")
        self.deliveries = counter("deliveries", "Answers of cascades delivered, by reason.", "cascade", "reason")
        self.judgements = counter("judgements", "Questions to judges of cascades.", "cascade", "result")
        text = "Exceptions and impossible decisions of dispatch policies."
        self.policy_faults = counter("policy_faults", text, "policy")
        self.output_tokens = 0
        self.total("output_tokens", "Output tokens relayed.")
        self.replica_continuations = self.replica_tokens = self.replica_tail_tokens = 0
        self.total("replica_continuations", "Continuations that began on a KV replica.")
        self.total("replica_tokens", "Tokens whose KV these had from the replica.")
        self.total("replica_tail_tokens", "Tokens behind the replica, which these computed.")
        self.now: Callable[[], tuple[int, int, int]] = lambda: (0, 0, 0)  # set by the state: what the gauges show
        self.gauge("calls_open", "Calls open now.", lambda: self.now()[0])
        self.gauge("sequences_open", "Sequences open now.", lambda: self.now()[1])
        self.gauge("sequences_waiting", "Sequences that wait for an instance.", lambda: self.now()[2])

    def note_error(self, of: str, predicted_ns: int, actual_ns: int) -> None:
        """A prediction of ``e2e`` or ``ttft`` met what happened."""
        error = (predicted_ns - actual_ns) / max(1, actual_ns)
        self.errors[of].observe(abs(error))
        self.errors_signed[of].observe(error)
