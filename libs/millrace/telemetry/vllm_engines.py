"""Figures of engines under vLLM's names: as workers tell their own, and as ingress knows all from summaries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from millrace.contracts.scheduler import SchedulerConfig
from millrace.contracts.status import EngineTotals


class EngineFigures(NamedTuple):
    """One engine now. ``config`` is None where who tells of it does not know it."""

    model: str
    engine: str
    running: int
    waiting: int
    blocks_free: int
    blocks_total: int
    preemptions: int
    output_tokens: int
    totals: EngineTotals
    config: SchedulerConfig | None = None

    @property
    def kv_usage(self) -> float:
        """Share of KV blocks in use, 0 to 1."""
        return 1 - self.blocks_free / max(1, self.blocks_total)


_LABELS = ["model_name", "engine"]
_CACHE = ("block_size", "num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency", "enable_prefix_caching")
_FIGURES: dict[str, tuple[type, str, Callable[[EngineFigures], float]]] = {
    "num_requests_running": (GaugeMetricFamily, "Sequences in the running batch", lambda figures: figures.running),
    "num_requests_waiting": (GaugeMetricFamily, "Sequences in the queue", lambda figures: figures.waiting),
    "kv_cache_usage_perc": (
        GaugeMetricFamily,
        "Share of KV blocks in use, 1 for all",
        lambda figures: figures.kv_usage,
    ),
    "generation_tokens": (CounterMetricFamily, "Tokens generated", lambda figures: figures.output_tokens),
    "num_preemptions": (CounterMetricFamily, "Preemptions in the engine", lambda figures: figures.preemptions),
}


def engine_families(engines: Iterable[EngineFigures]) -> Iterator[Metric]:
    """Families with one sample for each engine."""
    rows = list(engines)
    for name, (kind, text, read) in _FIGURES.items():
        family = kind(f"vllm:{name}", text, labels=_LABELS)
        for row in rows:
            family.add_metric([row.model, row.engine], read(row))
        yield family
    reasons = GaugeMetricFamily(
        "vllm:num_requests_waiting_by_reason", "Sequences in the queue, which all wait for capacity",
        labels=[*_LABELS, "reason"],
    )  # fmt: skip
    steps = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens of a step", labels=_LABELS)
    for row in rows:
        totals = row.totals
        reasons.add_metric([row.model, row.engine, "capacity"], row.waiting)
        steps.add_metric([row.model, row.engine], [("+Inf", totals.steps)], totals.decodes + totals.prefill_tokens)
    yield from (reasons, steps, _caches(rows))


def _caches(rows: list[EngineFigures]) -> Metric:
    family = GaugeMetricFamily("vllm:cache_config_info", "Configuration of the KV cache", labels=[*_LABELS, *_CACHE])
    for row in rows:
        if (config := row.config) is None:
            continue
        tokens = config.blocks_total * config.block_size
        values = (config.block_size, config.blocks_total, tokens, tokens / config.max_model_len, config.prefix_caching)
        family.add_metric([row.model, row.engine, *map(str, values)], 1)
    return family
