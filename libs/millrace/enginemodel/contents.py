"""Contents of a modelled engine's KV blocks: KV as it was written there, right or wrong.

A token's KV depends on all KV before it. The content of a block is therefore its tokens and the digest of the KV that
they were computed behind. A sequence that finds KV in its blocks, through the prefix index or a read, reads it block by
block. If each block lies behind the KV that it was computed behind, the digest is that of the tokens, and the tokens
decoded from it are right. Contents are kept only for engines that a network looks into: in all others nothing can be
wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple
from zlib import crc32

from millrace.enginemodel.sequence import ScheduledSequence
from millrace.enginemodel.stream import ModelledSequence
from millrace.enginemodel.tokens import ROOT, WORD_BYTES, kv_digest, kv_words


class KvContent(NamedTuple):
    """KV in one block.

    Attributes:
        before: Digest of the KV that it was computed behind.
        words: Of its tokens, as far as it is filled.
    """

    before: int
    words: bytes


#: A block that was never written, or that is being written: whatever was there.
NOTHING = KvContent(-1, b"")


def read_on(digest: int, content: KvContent, tokens: int) -> int:
    """Digest behind the first ``tokens`` of a block, read after KV with that digest. One of nothing known where the
    block does not belong there, or is not filled so far.
    """
    words = content.words[: tokens * WORD_BYTES]
    if content.before != digest or len(words) < tokens * WORD_BYTES:
        digest ^= ~content.before & 0xFFFF_FFFF
    return crc32(words, digest)


class KvContents:
    """The KV memory of one engine.

    What a running sequence writes is written down when a block gets a name, when its sequence leaves it, and when
    somebody looks: nothing is done for each token.

    Attributes:
        poisoned: Sequences that found something else than their own KV, for checkers: always none, unless a read went
            wrong unnoticed.
    """

    def __init__(self, block_size: int) -> None:
        self.poisoned: list[str] = []
        self._block_size = block_size
        self._written: dict[int, KvContent] = {}

    # What reads bring

    def put(self, blocks: Sequence[int], contents: Sequence[KvContent]) -> None:
        """A read wrote into these blocks."""
        self._written.update(zip(blocks, contents, strict=True))

    def look(self, blocks: Iterable[int], here: Iterable[ScheduledSequence]) -> list[KvContent]:
        """Return the current contents of these blocks. Args: here: sequences that hold blocks."""
        for sequence in here:
            self.left(sequence)
        return [self._written.get(block, NOTHING) for block in blocks]

    # What sequences write and find

    def found(self, sequence: ScheduledSequence, tokens: int) -> None:
        """A sequence begins on blocks that hold KV of its first ``tokens``, as it believes."""
        assert isinstance(sequence, ModelledSequence)
        digest, size, borders = ROOT, self._block_size, []
        for index, start in enumerate(range(0, tokens, size)):
            content = self._written.get(sequence.blocks[index], NOTHING)
            digest = read_on(digest, content, min(size, tokens - start))
            if start + size <= tokens:
                borders.append(digest)
        sequence.begin_on(digest, tokens, borders)
        if digest != kv_digest(sequence.token_ids[:tokens]):
            self.poisoned.append(sequence.sequence)

    def filled(self, sequence: ScheduledSequence, index: int) -> None:
        self._write(sequence, index, (index + 1) * self._block_size)

    def left(self, sequence: ScheduledSequence) -> None:
        """Writes down what a sequence has in the blocks that have no name yet. Call it before it leaves them."""
        for index in range(sequence.named_blocks, -(-sequence.computed // self._block_size)):
            self._write(sequence, index, sequence.computed)

    def _write(self, sequence: ScheduledSequence, index: int, computed: int) -> None:
        """Puts what a sequence computed itself behind what it found in that block."""
        assert isinstance(sequence, ModelledSequence)
        start, end = index * self._block_size, min(computed, (index + 1) * self._block_size)
        if end <= sequence.found:
            return
        block = sequence.blocks[index]
        before, words, since = self._border(sequence, index), b"", start
        if start < sequence.found:
            since, old = sequence.found, self._written.get(block, NOTHING)
            before, words = old.before, old.words[: (since - start) * WORD_BYTES].ljust((since - start) * WORD_BYTES)
        self._written[block] = KvContent(before, words + kv_words(sequence.token_ids[since:end]))

    def _border(self, sequence: ModelledSequence, index: int) -> int:
        """Digest in front of a sequence's block; computes what is missing up to it."""
        borders, size = sequence.borders, self._block_size
        while len(borders) < index:
            start, end = len(borders) * size, (len(borders) + 1) * size
            digest = borders[-1] if borders else ROOT
            if start < sequence.found:
                start, digest = sequence.found, sequence.found_digest
            borders.append(kv_digest(sequence.token_ids[start:end], digest))
        return borders[index - 1] if index else ROOT
