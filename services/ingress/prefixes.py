"""Names the blocks of prompts, so that predictors can tell who has them in a prefix cache.

A hash names a block and all before it (``millrace.kvcache.chain``). Nothing else that ingress knows of a request makes
its KV another one; what does (an adapter, a salt, an image) would be hashed into the first parent.
"""

from __future__ import annotations

from millrace.kvcache.chain import extend_chain, pack_hashes

from services.ingress.state import IngressState, OpenSequence

#: Blocks that are named of one sequence: 131,072 tokens in blocks of 16. What is behind counts as not cached.
BLOCKS_MAX = 8_192


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
    blocks: PromptBlocks | None = sequence.blocks
    if blocks is None:
        size = state.cluster.cached_block_size(sequence.call.call.model)
        blocks = sequence.blocks = PromptBlocks(sequence.prompt, size)
    return blocks


def blocks_decoded(sequence: OpenSequence) -> bytes:
    """What a sequence that has ended leaves in a prefix cache behind its prompt, where that was named."""
    blocks: PromptBlocks | None = sequence.blocks
    return blocks.decoded(sequence.prompt, sequence.log) if blocks is not None else b""
