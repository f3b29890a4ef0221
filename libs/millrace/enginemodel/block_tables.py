"""KV block tables of one engine's sequences: growth, naming of full blocks, release."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millrace.contracts.kv import KvGroup, KvNeed, blocks_for
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.sequence import ScheduledSequence
from millrace.kvcache.pool import BlockPool

if TYPE_CHECKING:
    from millrace.enginemodel.contents import KvContents


class BlockTables:
    """The block pool of one engine, and who holds what of it.

    Attributes:
        contents: What is in the blocks; None without prefix caching or checksums.
        beside: Groups of which sequences hold blocks beside those of full attention, which are the ones that move.
        replicas: Blocks of KV replicas by name, oldest first. They are in no batch; the newest is given up where
            anything else lacks blocks.
    """

    def __init__(self, parameters: EngineParameters) -> None:
        self.parameters = parameters
        self.pool = BlockPool(parameters.blocks_total, caching=parameters.prefix_caching)
        self.contents: KvContents | None = None
        self.beside = _beside(parameters)
        self.replicas: dict[str, list[int]] = {}

    def make_room(self, blocks: int) -> bool:
        """Gives up replicas until so many blocks are free, if giving up all of them is enough. Returns whether they
        are free.
        """
        if blocks > self.pool.free + sum(map(len, self.replicas.values())):
            return False
        while blocks > self.pool.free and self.replicas:
            _name, held = self.replicas.popitem()
            self.pool.release(held)
        return blocks <= self.pool.free

    def steps_with_blocks(self, sequences: list[ScheduledSequence], steps: int) -> int:
        """Return the number of steps, at most ``steps``, for which these sequences find the blocks that they need.

        All of the sequences decode.
        """
        block_size, free = self.parameters.block_size, self.pool.free
        if len(sequences) * -(-steps // block_size) <= free:
            return steps
        spare = [sequence.slots - sequence.computed for sequence in sequences]
        low, high = 0, steps
        while low < high:
            middle = (low + high + 1) // 2
            if sum(-(-(middle - slots) // block_size) for slots in spare if middle > slots) <= free:
                low = middle
            else:
                high = middle - 1
        return low

    def _lacks_beside(self, sequence: ScheduledSequence, end: int) -> int:
        """Blocks of other groups that a step up to ``end`` takes, less those that windows have left by then."""
        held = len(sequence.beside)
        return sum(group.blocks_in_step(sequence.computed, end) for group in self.beside) - held

    def _keep_beside(self, sequence: ScheduledSequence, end: int) -> None:
        lacking = self._lacks_beside(sequence, end)
        if lacking < 0:
            self.pool.release(sequence.beside[:-lacking])
            del sequence.beside[:-lacking]
        elif lacking:
            sequence.beside += self.pool.take(lacking)

    def _grow(self, sequence: ScheduledSequence, end: int) -> None:
        """Gives a sequence blocks for ``end`` tokens, which are free, and names those that this step fills."""
        block_size = self.parameters.block_size
        if self.beside:
            self._keep_beside(sequence, end)
        missing = -(-(end - sequence.slots) // block_size)
        if missing > 0:
            sequence.blocks += self.pool.take(missing)
            sequence.slots += missing * block_size
        self._name_blocks(sequence, min(end, sequence.total))

    def _name_blocks(self, sequence: ScheduledSequence, tokens: int) -> None:
        """Enters full blocks into the prefix index, up to ``tokens`` of known content."""
        if not self.parameters.prefix_caching:
            return
        block_size = self.parameters.block_size
        for index in range(sequence.named_blocks, tokens // block_size):
            self.pool.name(sequence.blocks[index], sequence.block_hash(index, block_size))
            if self.contents is not None:
                self.contents.filled(sequence, index)
            sequence.named_blocks = index + 1

    def _release(self, sequence: ScheduledSequence) -> None:
        if self.contents is not None:
            self.contents.left(sequence)
        self.pool.release(sequence.blocks + sequence.beside)
        sequence.blocks, sequence.beside = [], []
        sequence.slots = 0
        sequence.named_blocks = 0


def _beside(parameters: EngineParameters) -> list[KvGroup]:
    """All groups but the first of full attention. Raises ValueError: there is none of blocks of ``block_size``, or the
    pool does not hold one sequence.
    """
    groups = list(parameters.groups)
    whole = [group for group in groups if group.need is KvNeed.ALL and group.block_tokens == parameters.block_size]
    if groups and not whole:
        raise ValueError(f"groups: none keeps all tokens in blocks of {parameters.block_size}")
    if blocks_for(parameters.max_model_len, parameters.block_size, groups) > parameters.blocks_total:
        raise ValueError(f"blocks_total: {parameters.blocks_total} blocks cannot hold one sequence of all groups")
    return [group for group in groups if group is not whole[0]]
