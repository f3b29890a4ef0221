"""Block hashes of prompts, from which predictors tell which instance has them in its prefix cache.

A hash covers a block and all blocks before it (``millrace.kvcache.chain``). Its salt and its adapter, which are the
first parent, are all else that ingress knows of a request and that changes its KV.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from millrace.kvcache.chain import extend_chain, pack_hashes, salted_root

#: Blocks hashed per sequence: 131,072 tokens in blocks of 16. Later blocks count as not cached.
BLOCKS_MAX = 8_192

#: Every 8th block hash is remembered with the instance it was sent to: a shorter shared prefix saves little.
HOLDER_STRIDE = 8
#: Remembered block hashes: prompts of 16 million tokens in blocks of 16, in about 20 MB.
HOLDERS_MAX = 1 << 17


class PromptBlocks:
    """Hashes of a prompt's full blocks.

    Attributes:
        size: Of a block, tokens; 0 where no instance caches.
        packed: The prompt's hashes in wire form.
        hashes: Of the prompt; after the end also of the output behind it.
    """

    __slots__ = ("_root", "hashes", "packed", "size")

    def __init__(self, prompt: list[int], size: int, salt: str = "") -> None:
        self.size = size
        self._root = salted_root(salt)
        self.hashes: list[int] = []
        if size:
            extend_chain(self.hashes, prompt[: BLOCKS_MAX * size], size, self._root)
        self.packed = pack_hashes(self.hashes)

    def decoded(self, prompt: list[int], output: list[int]) -> bytes:
        """Packed hashes of an ended sequence's blocks behind these. The KV of its last token was never computed."""
        begin, count = len(self.hashes) * self.size, len(self.hashes)
        if not self.size or len(prompt) + len(output) - 1 < begin + self.size:
            return b""
        whole = prompt + output[:-1]
        extend_chain(self.hashes, whole[: BLOCKS_MAX * self.size], self.size, self._root)
        further, self.hashes[count:] = self.hashes[count:], []
        return pack_hashes(further)


class PrefixHolders:
    """Instances to which this ingress lately sent each prompt prefix.

    A policy that asks only some predictors also asks the holder of a prompt's longest prefix: a random draw among many
    would rarely include it.
    """

    def __init__(self, *, blocks_max: int = HOLDERS_MAX) -> None:
        self._blocks_max = blocks_max
        self._holders: OrderedDict[int, str] = OrderedDict()

    def note(self, blocks: PromptBlocks, instance: str) -> None:
        for block in blocks.hashes[HOLDER_STRIDE - 1 :: HOLDER_STRIDE]:
            self._holders[block] = instance
            self._holders.move_to_end(block)
        while len(self._holders) > self._blocks_max:
            self._holders.popitem(last=False)

    def find(self, blocks: PromptBlocks, among: Collection[str]) -> str:
        """The instance among these that was sent the longest prefix of a prompt last; empty for none."""
        for block in reversed(blocks.hashes[HOLDER_STRIDE - 1 :: HOLDER_STRIDE]):
            holder = self._holders.get(block, "")
            if holder in among:
                return holder
        return ""
