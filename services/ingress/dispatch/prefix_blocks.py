"""Names the blocks of prompts, so that predictors can tell who has them in a prefix cache.

A hash names a block and all before it (``millrace.kvcache.chain``). Nothing else that ingress knows of a request makes
its KV another one; what does (an adapter, a salt, an image) would be hashed into the first parent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import TYPE_CHECKING

from millrace.kvcache.chain import extend_chain, pack_hashes

if TYPE_CHECKING:
    from services.ingress.state import IngressState, OpenSequence

#: Blocks that are named of one sequence: 131,072 tokens in blocks of 16. What is behind counts as not cached.
BLOCKS_MAX = 8_192

#: Every so manieth block of a prompt is kept in mind with its instance: what is shared of shorter ones saves little.
HOLDER_STRIDE = 8
#: Blocks kept in mind: prompts of 16 million tokens in blocks of 16, in about 20 MB.
HOLDERS_MAX = 1 << 17


class PromptBlocks:
    """Hashes of a prompt's full blocks.

    Attributes:
        size: Of a block, tokens; 0 where no instance caches.
        packed: As they travel.
        hashes: Of the prompt, and once it has ended of what was decoded behind it.
    """

    __slots__ = ("hashes", "packed", "size")

    def __init__(self, prompt: list[int], size: int) -> None:
        self.size = size
        self.hashes: list[int] = []
        if size:
            extend_chain(self.hashes, prompt[: BLOCKS_MAX * size], size)
        self.packed = pack_hashes(self.hashes)

    def decoded(self, prompt: list[int], output: list[int]) -> bytes:
        """Packed hashes of the blocks behind these of a sequence that has ended. Its last token was never computed."""
        begin, count = len(self.hashes) * self.size, len(self.hashes)
        if not self.size or len(prompt) + len(output) - 1 < begin + self.size:
            return b""
        whole = prompt + output[:-1]
        extend_chain(self.hashes, whole[: BLOCKS_MAX * self.size], self.size)
        further, self.hashes[count:] = self.hashes[count:], []
        return pack_hashes(further)


def blocks_of(state: IngressState, sequence: OpenSequence) -> PromptBlocks:
    """A sequence's prompt, named once."""
    if sequence.blocks is None:
        size = state.cluster.cached_block_size(sequence.call.call.model)
        sequence.blocks = PromptBlocks(sequence.prompt, size)
    return sequence.blocks


def blocks_decoded(sequence: OpenSequence) -> bytes:
    """What a sequence that has ended leaves in a prefix cache behind its prompt, where that was named."""
    return sequence.blocks.decoded(sequence.prompt, sequence.log) if sequence.blocks is not None else b""


class PrefixHolders:
    """Who was given prompts with which beginning lately, by this ingress. One that has most of a prompt is asked, too,
    where a policy asks but some: drawn by chance alone it would rarely be among many.
    """

    def __init__(self, *, blocks_max: int = HOLDERS_MAX) -> None:
        self._blocks_max = blocks_max
        self._holders: OrderedDict[int, str] = OrderedDict()

    def note(self, blocks: PromptBlocks, instance: str) -> None:
        """A prompt went there."""
        for block in blocks.hashes[HOLDER_STRIDE - 1 :: HOLDER_STRIDE]:
            self._holders[block] = instance
            self._holders.move_to_end(block)
        while len(self._holders) > self._blocks_max:
            self._holders.popitem(last=False)

    def find(self, blocks: PromptBlocks, among: Collection[str]) -> str:
        """Whoever of these was given the longest beginning of a prompt last; empty for nobody."""
        for block in reversed(blocks.hashes[HOLDER_STRIDE - 1 :: HOLDER_STRIDE]):
            holder = self._holders.get(block, "")
            if holder in among:
                return holder
        return ""
