"""Layout of the KV cache to ask vLLM for: one in which a block of all layers is one piece.

vLLM asks every worker which layouts its attention backends can use, the preferred one first, and takes that one. Our
preference is named here, not by ``VLLM_KV_CACHE_LAYOUT``: a backend that cannot use it then keeps its own, where the
environment variable would make the engine refuse to start. The variable, set by hand, still wins.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from millrace.contracts.kv import KvPlane

from services.worker.vllm_engine.kv_words import SETTINGS

#: Axes from the outermost: blocks, layers, heads, tokens, content. With LBHNC a block is one piece per layer.
BLOCK_FIRST = "BLHNC"

#: The mixin stands in front of a vLLM worker; to the type checker it is any.
_Base: Any = Any if TYPE_CHECKING else object


def block_first(layouts: list[str]) -> list[str]:
    """The same layouts with BLHNC in front, where it is among them."""
    return sorted(layouts, key=lambda name: name != BLOCK_FIRST)


class BlockFirstMixin(_Base):
    """A worker that prefers a block to be one piece of memory, where its KV may move."""

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """As vLLM's, in another order."""
        layouts: list[str] = super().get_supported_kv_cache_layouts()
        return block_first(layouts) if SETTINGS in self.vllm_config.additional_config else layouts


def merged(planes: Iterable[KvPlane]) -> list[KvPlane]:
    """The same bytes in as few planes as possible: layers that lie side by side in every block become one."""
    found: list[KvPlane] = []
    for plane in planes:
        last = found[-1] if found else None
        beside = last is not None and last.stride == plane.stride and last.offset + last.bytes == plane.offset
        if last is not None and beside and last.bytes + plane.bytes <= plane.stride:
            found[-1] = KvPlane(offset=last.offset, stride=last.stride, bytes=last.bytes + plane.bytes)
        else:
            found.append(plane)
    return found
