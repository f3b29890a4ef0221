"""A vLLM server's figures under its names, so that its dashboards show this ingress's: of requests, as ingress and the
engines that ended them saw these, and of engines, as their summaries say it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec
from millrace.actor.histograms import Histogram
from millrace.contracts.status import EngineTotals
from millrace.membership.member import Member
from millrace.telemetry.vllm_engines import EngineFigures, engine_families
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

if TYPE_CHECKING:
    from services.ingress.calls.open_call import OpenCall

#: Upper bounds: gaps between tokens, whole requests, tokens.
_GAPS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 40.0, 80.0)
_REQUESTS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 480.0)
_TOKENS = tuple(float(1 << power) for power in range(18))
_COUNTS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0)
_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("Time from arrival to the first token", _REQUESTS_S),
    "inter_token_latency_seconds": ("Time between two token messages of one sequence", _GAPS_S),
    "request_time_per_output_token_seconds": ("Time per token behind the first, a request's mean", _GAPS_S),
    "e2e_request_latency_seconds": ("Time from arrival to completion", _REQUESTS_S),
    "request_decode_time_seconds": ("Time from the first token to completion", _REQUESTS_S),
    "request_queue_time_seconds": ("Time from submission to the first batch", _REQUESTS_S),
    "request_prefill_time_seconds": ("Time from the first batch to the first token", _REQUESTS_S),
    "request_inference_time_seconds": ("Time from the first batch to the end, in the last epoch", _REQUESTS_S),
    "request_num_preemptions": ("Preemptions of a sequence, in its last epoch", _COUNTS),
    "request_params_n": ("Choices asked for", _COUNTS),
    "request_params_max_tokens": ("Bound of output tokens", _TOKENS),
    "request_prompt_tokens": ("Tokens of a prompt", _TOKENS),
    "request_generation_tokens": ("Tokens of an output", _TOKENS),
    "request_max_num_generation_tokens": ("Longest output of a request", _TOKENS),
}


class ModelFigures:
    """Calls of one model, those of cascades included."""

    def __init__(self) -> None:
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self.between = self.histograms["inter_token_latency_seconds"]
        self.prompt_tokens = self.cached_tokens = self.rejected = 0
        self.finished: Counter[str] = Counter()

    def complete(self, call: OpenCall, now_ns: int) -> None:
        """Count a call that is complete."""
        histograms = self.histograms
        outputs = [len(sequence.log) for sequence in call.sequences]
        histograms["e2e_request_latency_seconds"].observe((now_ns - call.arrival_ns) / 1e9)
        if call.first_token_ns:
            decode_s = (now_ns - call.first_token_ns) / 1e9
            histograms["time_to_first_token_seconds"].observe((call.first_token_ns - call.arrival_ns) / 1e9)
            histograms["request_decode_time_seconds"].observe(decode_s)
            histograms["request_time_per_output_token_seconds"].observe(decode_s / max(1, max(outputs) - 1))
        for prompt in call.call.prompts:
            histograms["request_prompt_tokens"].observe(len(prompt))
        for tokens in outputs:
            histograms["request_generation_tokens"].observe(tokens)
        histograms["request_max_num_generation_tokens"].observe(max(outputs))
        histograms["request_params_n"].observe(call.call.n)
        histograms["request_params_max_tokens"].observe(call.call.sampling.max_tokens)
        self.cached_tokens += call.cached_tokens
        for sequence in call.sequences:
            self.finished[sequence.output.finish_reason] += 1
            if (times := sequence.times) is not None:
                histograms["request_queue_time_seconds"].observe(times.queued_ns / 1e9)
                histograms["request_prefill_time_seconds"].observe(times.prefill_ns / 1e9)
                histograms["request_inference_time_seconds"].observe(times.running_ns / 1e9)
                histograms["request_num_preemptions"].observe(times.preemptions)


_COUNTERS: tuple[tuple[str, str, Callable[[ModelFigures], int]], ...] = (
    ("prompt_tokens", "Prompt tokens of accepted requests", lambda figures: figures.prompt_tokens),
    ("prefix_cache_queries", "Prompt tokens looked for in prefix caches", lambda figures: figures.prompt_tokens),
    ("prefix_cache_hits", "Prompt tokens found there", lambda figures: figures.cached_tokens),
    ("admission_rejections", "Requests refused because queues are full", lambda figures: figures.rejected),
)


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
        for name, text, read in _COUNTERS:
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            for model, figures in models:
                counter.add_metric([model], read(figures))
            yield counter
        ended = CounterMetricFamily(
            "vllm:request_success", "Outputs that ended", labels=["model_name", "finished_reason"]
        )
        for model, figures in models:
            for reason, count in list(figures.finished.items()):
                ended.add_metric([model, reason], count)
        yield ended

    def describe(self) -> list[Metric]:
        """Nothing ahead of the first scrape."""
        return []


def engine_figures(members: Iterable[Member]) -> Iterator[EngineFigures]:
    """Figures of the engines that have told a summary."""
    for member in members:
        if (summary := member.summary) is not None:
            yield EngineFigures(
                summary.model,
                summary.instance,
                summary.running,
                summary.waiting,
                summary.blocks_free,
                summary.blocks_total,
                summary.preemptions,
                summary.output_tokens_total,
                summary.indicators.totals if summary.indicators is not None else EngineTotals(),
                member.record,
            )


class EngineMetrics(Collector):
    """The engines' figures. They stand at the API's port alone, for whoever asks it as he would `vllm serve`: their
    workers tell them at theirs, and one Prometheus that read both would count them twice.
    """

    def __init__(self, members: Callable[[], Iterable[Member]]) -> None:
        self._members = members

    def collect(self) -> Iterator[Metric]:
        return engine_families(engine_figures(self._members()))


def load_report(members: Iterable[Member], model: str, form: str) -> bytes:
    """Value of the header ``endpoint-load-metrics`` (ORCA) as vLLM has it; empty for a form that there is not.

    Args:
        model: Whose instances are told: the mean share of their KV in use, and all that wait.
        form: ``TEXT`` or ``JSON``, in any case.
    """
    engines = [figures for figures in engine_figures(members) if figures.model == model]
    usage = sum(figures.kv_usage for figures in engines) / max(1, len(engines))
    named = {"kv_cache_usage_perc": usage, "num_requests_waiting": float(sum(each.waiting for each in engines))}
    match form.upper():
        case "TEXT":
            return ("TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in named.items())).encode()
        case "JSON":
            return b"JSON " + msgspec.json.encode({"named_metrics": named})
        case _:
            return b""
