"""Sizes of language models, as far as the time of a step depends on them."""

from __future__ import annotations

import msgspec


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
