"""A vLLM server's figures of requests, under its names, so that its dashboards show this ingress's.

What only engines know (batch, queue, KV) workers tell under vLLM's names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from millrace.actor.histograms import Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

if TYPE_CHECKING:
    from services.ingress.calls.open_call import OpenCall

#: Upper bounds: gaps between tokens, whole requests, tokens.
_GAPS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 40.0, 80.0)
_REQUESTS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 480.0)
_TOKENS = tuple(float(1 << power) for power in range(18))
_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("Time from arrival to the first token", _REQUESTS_S),
    "inter_token_latency_seconds": ("Time between two token messages of one sequence", _GAPS_S),
    "request_time_per_output_token_seconds": ("Time per token behind the first, a request's mean", _GAPS_S),
    "e2e_request_latency_seconds": ("Time from arrival to completion", _REQUESTS_S),
    "request_decode_time_seconds": ("Time from the first token to completion", _REQUESTS_S),
    "request_prompt_tokens": ("Tokens of a prompt", _TOKENS),
    "request_generation_tokens": ("Tokens of an output", _TOKENS),
    "request_max_num_generation_tokens": ("Longest output of a request", _TOKENS),
}


class ModelFigures:
    """Calls of one model, those of cascades included."""

    def __init__(self) -> None:
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self.between = self.histograms["inter_token_latency_seconds"]
        self.prompt_tokens = 0
        self.finished: Counter[str] = Counter()

    def complete(self, call: OpenCall, now_ns: int) -> None:
        """Count a call that is complete."""
        observe = self._observe
        outputs = [len(sequence.log) for sequence in call.sequences]
        observe("e2e_request_latency_seconds", (now_ns - call.arrival_ns) / 1e9)
        if call.first_token_ns:
            decode_s = (now_ns - call.first_token_ns) / 1e9
            observe("time_to_first_token_seconds", (call.first_token_ns - call.arrival_ns) / 1e9)
            observe("request_decode_time_seconds", decode_s)
            observe("request_time_per_output_token_seconds", decode_s / max(1, max(outputs) - 1))
        for prompt in call.call.prompts:
            observe("request_prompt_tokens", len(prompt))
        for tokens in outputs:
            observe("request_generation_tokens", tokens)
        observe("request_max_num_generation_tokens", max(outputs))
        self.finished.update(sequence.output.finish_reason for sequence in call.sequences)

    def _observe(self, name: str, value: float) -> None:
        self.histograms[name].observe(value)


class VllmMetrics(Collector):
    """Figures of each model, as Prometheus reads them."""

    def __init__(self, registry: CollectorRegistry | None) -> None:
        self._models: dict[str, ModelFigures] = {}
        if registry is not None:
            registry.register(self)

    def of(self, model: str) -> ModelFigures:
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = ModelFigures()
        return found

    def collect(self) -> Iterator[Metric]:
        models = list(self._models.items())
        for name, (text, _) in _HISTOGRAMS.items():
            histogram = HistogramMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            for model, figures in models:
                kept = figures.histograms[name]
                histogram.add_metric([model], kept.buckets(), kept.sum)
            yield histogram
        prompts = CounterMetricFamily("vllm:prompt_tokens", "Prompt tokens of accepted requests", labels=["model_name"])
        ended = CounterMetricFamily(
            "vllm:request_success", "Outputs that ended", labels=["model_name", "finished_reason"]
        )
        for model, figures in models:
            prompts.add_metric([model], figures.prompt_tokens)
            for reason, count in list(figures.finished.items()):
                ended.add_metric([model, reason], count)
        yield from (prompts, ended)

    def describe(self) -> list[Metric]:
        """Nothing ahead of the first scrape."""
        return []
