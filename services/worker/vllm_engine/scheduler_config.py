"""Configuration of vLLM's scheduler as the rest of the repository names it."""

from __future__ import annotations

from typing import Any

from millrace.contracts.scheduler import SchedulerConfig


def scheduler_config(vllm_config: Any) -> SchedulerConfig:
    """Read it from the VllmConfig of an engine that has started."""
    scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
    blocks = (cache.num_gpu_blocks or 0) - 1  # less vLLM's null block, as in the snapshots
    return SchedulerConfig(
        max_model_len=vllm_config.model_config.max_model_len,
        max_sequences=scheduler.max_num_seqs,
        token_budget=scheduler.max_num_batched_tokens,
        block_size=cache.block_size,
        blocks_total=blocks or unbounded_blocks(vllm_config),
        long_prefill_token_threshold=scheduler.long_prefill_token_threshold,
        chunked_prefill=scheduler.enable_chunked_prefill,
        prefix_caching=bool(cache.enable_prefix_caching),
        watermark=scheduler.watermark,
        reserve_full_prompt=scheduler.scheduler_reserve_full_isl,
        async_scheduling=bool(scheduler.async_scheduling),
    )


def unbounded_blocks(vllm_config: Any) -> int:
    """Blocks that a model without a KV cache (an encoder) is told to have: as many as a full batch could ask for."""
    length, size = vllm_config.model_config.max_model_len, vllm_config.cache_config.block_size
    return int(vllm_config.scheduler_config.max_num_seqs * -(-length // size))
