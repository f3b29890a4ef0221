"""Configuration of an engine, as far as its scheduling depends on it."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class QueuePolicy(StrEnum):
    """Order of the waiting queue, and who is preempted."""

    FCFS = "fcfs"  # first come first served; the newest running sequence is preempted
    PRIORITY = "priority"  # smallest (priority, arrival) first; the largest one running is preempted


class EngineParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits and switches of the scheduler. Names in brackets are vLLM's.

    Attributes:
        max_model_len: Bound of prompt plus output, tokens.
        block_size: Tokens per KV block.
        blocks_total: Usable KV blocks: vLLM's ``num_gpu_blocks`` less its null block.
        max_sequences: Bound of the running batch (``max_num_seqs``).
        token_budget: Tokens computed per step (``max_num_batched_tokens``).
        long_prefill_token_threshold: Longest prompt chunk while others wait or run; 0 for no bound.
        chunked_prefill: Whether a prompt may be cut where the budget ends (``enable_chunked_prefill``).
        prefix_caching: Whether full blocks are found by content (``enable_prefix_caching``).
        watermark: Share of all blocks kept free when a waiting sequence is admitted beside running ones.
        reserve_full_prompt: Admit a sequence only if its whole prompt fits now, not only its first chunk
            (``scheduler_reserve_full_isl``).
        segments: Free blocks are handed out in contiguous runs (kvcache/segments.py), as our engines do.
        async_scheduling: The next step is scheduled before the outputs of the one before are known, as vLLM does
            by default where it can.
    """

    max_model_len: int = 8192
    block_size: int = 16
    blocks_total: int = 4096
    max_sequences: int = 256
    token_budget: int = 2048
    long_prefill_token_threshold: int = 0
    chunked_prefill: bool = True
    prefix_caching: bool = True
    watermark: float = 0.0
    reserve_full_prompt: bool = True
    segments: bool = False
    policy: QueuePolicy = QueuePolicy.FCFS
    async_scheduling: bool = False

    def __post_init__(self) -> None:
        """Refuses what no engine could run. Raises ValueError naming the field."""
        for field in ("max_model_len", "block_size", "blocks_total", "max_sequences", "token_budget"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, is {getattr(self, field)}")
        if self.blocks_total * self.block_size < self.max_model_len:
            raise ValueError(
                f"blocks_total: {self.blocks_total} blocks of {self.block_size} tokens cannot hold one sequence of "
                f"max_model_len = {self.max_model_len} tokens"
            )
        if not self.chunked_prefill and self.token_budget < self.max_model_len:
            raise ValueError("token_budget must be at least max_model_len where chunked_prefill is off")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark must be in [0, 1), is {self.watermark}")

    @property
    def watermark_blocks(self) -> int:
        """Blocks kept free at admission. vLLM counts its null block in."""
        return int(self.watermark * (self.blocks_total + 1))
