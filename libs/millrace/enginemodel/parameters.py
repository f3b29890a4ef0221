"""Configuration of an engine, as far as its scheduling depends on it."""

from __future__ import annotations

from millrace.contracts.kv import KvGroup
from millrace.contracts.scheduler import SchedulerConfig


class EngineParameters(SchedulerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of a modelled engine: its scheduler's, checked and with defaults.

    Attributes:
        groups: Of layers that take blocks of their own; none for one that keeps all.
    """

    max_model_len: int = 8192
    max_sequences: int = 256
    token_budget: int = 2048
    block_size: int = 16
    blocks_total: int = 4096
    groups: tuple[KvGroup, ...] = ()

    def __post_init__(self) -> None:
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
