"""Which layout of the KV cache to ask vLLM for: one in which a block of all layers is one piece (FlowKV, section 3.3).

vLLM asks every worker which layouts its attention backends can use, the preferred one first, and takes that. Naming
our preference here, and not by ``VLLM_KV_CACHE_LAYOUT``, lets a backend that cannot use it keep its own, where the
environment variable would make the engine refuse to start; the variable, set by hand, still wins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

#: Axes from the outermost: blocks, layers, heads, tokens, content. With LBHNC a block is one piece per layer.
BLOCK_FIRST = "BLHNC"

#: The mixin stands in front of a vLLM worker; to the type checker it is any.
_Base: Any = Any if TYPE_CHECKING else object


def block_first(layouts: list[str]) -> list[str]:
    """The same layouts with BLHNC in front, where it is among them."""
    return sorted(layouts, key=lambda name: name != BLOCK_FIRST)


class BlockFirstMixin(_Base):
    """A worker that prefers a block to be one piece of memory."""

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """As vLLM's, in another order."""
        return block_first(super().get_supported_kv_cache_layouts())
