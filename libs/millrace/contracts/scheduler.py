"""Configuration of an engine's scheduler: the one list of the limits and switches that a forecast must know.

An engine tells it (``status.EngineDescription``), its worker registers it (``status.InstanceRecord``), modelled engines
and forecasts compute with it (``enginemodel.EngineParameters``). A parameter that is added here reaches all of them;
what else it needs is the line that reads it from vLLM (services/worker/vllm_engine/scheduler_config.py) and its effect
in enginemodel/scheduler.py.
"""

from __future__ import annotations

from typing import Any

import msgspec


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and switches of a scheduler. Names in brackets are vLLM's.

    Attributes:
        max_model_len: Bound of prompt plus output, tokens.
        max_sequences: Bound of the running batch (``max_num_seqs``).
        token_budget: Tokens computed per step (``max_num_batched_tokens``).
        block_size: Tokens per KV block.
        blocks_total: Usable KV blocks: vLLM's ``num_gpu_blocks`` less its null block.
        long_prefill_token_threshold: Longest prompt chunk while others wait or run; 0 for no bound.
        chunked_prefill: Whether a prompt may be cut where the budget ends (``enable_chunked_prefill``).
        prefix_caching: Whether full blocks are found by content (``enable_prefix_caching``).
        watermark: Share of all blocks kept free when a waiting sequence is admitted beside running ones.
        reserve_full_prompt: Admit a sequence only if its whole prompt fits now, not only its first chunk
            (``scheduler_reserve_full_isl``).
        async_scheduling: The next step is scheduled before the outputs of the one before are known, as vLLM does
            by default where it can.
    """

    max_model_len: int
    max_sequences: int
    token_budget: int
    block_size: int
    blocks_total: int
    long_prefill_token_threshold: int = 0
    chunked_prefill: bool = True
    prefix_caching: bool = True
    watermark: float = 0.0
    reserve_full_prompt: bool = True
    async_scheduling: bool = False


def step_budget(config: SchedulerConfig, tokens: int) -> int:
    """The token budget of a step where so many tokens are asked for.

    It leaves every running sequence its decode, so that none waits for several steps, and is never above the engine's
    own. Without chunked prefill a whole prompt must fit, and the budget stays.

    Args: tokens: 0 for the engine's own.
    """
    if tokens <= 0 or not config.chunked_prefill:
        return config.token_budget
    return min(config.token_budget, max(tokens, config.max_sequences + 1))


_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(SchedulerConfig)}


def scheduler_fields(source: SchedulerConfig) -> dict[str, Any]:
    """The fields of SchedulerConfig by name, of a struct that extends it.

    Values that equal a default are that very object: msgspec leaves defaults out of a message by identity.
    """
    values = {name: getattr(source, name) for name in _DEFAULTS}
    return {name: _DEFAULTS[name] if value == _DEFAULTS[name] else value for name, value in values.items()}
