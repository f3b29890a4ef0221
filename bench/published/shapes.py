"""Sizes of language models, as far as the time of a step depends on them."""

from __future__ import annotations

import msgspec

#: vLLM's default ``gpu_memory_utilization``.
MEMORY_SHARE = 0.9
#: What a GPU needs beside weights and KV: activations of the largest step, captured graphs. An estimate.
ACTIVATION_BYTES = 1.5e9
#: Memory of GPUs as their driver reports it, bytes.
H100_BYTES, H200_BYTES = 85.5e9, 150.7e9


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer with gated MLPs.

    Attributes:
        hidden: Width.
        heads: Query heads.
        key_value_heads: Heads of keys and values.
        expanded: Width inside the MLP.
        head_size: Of one head.
        bytes_per_weight: 2 for 16 bits, 1 for 8.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    expanded: int
    vocabulary: int
    head_size: int = 128
    bytes_per_weight: int = 2

    @property
    def qkv_width(self) -> int:
        """Outputs of the projection before attention."""
        return (self.heads + 2 * self.key_value_heads) * self.head_size

    @property
    def kv_bytes_per_token(self) -> int:
        """KV of one token in one layer, 16 bits."""
        return 2 * 2 * self.key_value_heads * self.head_size

    @property
    def weight_bytes(self) -> float:
        """Of all weights: attention, gated MLP, embedding and head."""
        attention = self.hidden * self.qkv_width + self.heads * self.head_size * self.hidden
        layer = attention + 3 * self.hidden * self.expanded
        return float(self.bytes_per_weight * (self.layers * layer + 2 * self.vocabulary * self.hidden))

    def kv_tokens(self, *, gpus: int, memory_bytes: float) -> int:
        """Tokens of KV that fit beside the weights on GPUs of this memory under vLLM's default share of it.

        Below 1 where the weights alone do not fit.
        """
        idle = gpus * (MEMORY_SHARE * memory_bytes - ACTIVATION_BYTES) - self.weight_bytes
        return int(idle / (self.kv_bytes_per_token * self.layers))


LLAMA_2_7B = Shape(
    name="Llama-2-7B, float16", layers=32, hidden=4096, heads=32, key_value_heads=32, expanded=11_008, vocabulary=32_000
)
LLAMA_3_8B = Shape(
    name="Llama-3-8B, bfloat16",
    layers=32,
    hidden=4096,
    heads=32,
    key_value_heads=8,
    expanded=14_336,
    vocabulary=128_256,
)
QWEN_2_7B = Shape(
    name="Qwen2-7B, bfloat16", layers=28, hidden=3584, heads=28, key_value_heads=4, expanded=18_944, vocabulary=152_064
)
QWEN_3_32B = Shape(
    name="Qwen3-32B, bfloat16", layers=64, hidden=5120, heads=64, key_value_heads=8, expanded=25_600, vocabulary=151_936
)
LLAMA_3_70B = Shape(
    name="Llama-3-70B, bfloat16",
    layers=80,
    hidden=8192,
    heads=64,
    key_value_heads=8,
    expanded=28_672,
    vocabulary=128_256,
)
