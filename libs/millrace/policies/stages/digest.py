"""Histograms of sequence lengths with logarithmic bins: what instances tell about their sequences."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import msgspec

#: Bins of a digest. The first one is [0, SHORTEST), the last one has no end.
BINS = 40
SHORTEST, LONGEST = 32, 1 << 20

#: First length of each bin, tokens: 0, 32, then rising by about 1.31.
STARTS = (0, *(round(SHORTEST * (LONGEST / SHORTEST) ** (k / (BINS - 2))) for k in range(BINS - 1)))


class LengthDigest(msgspec.Struct, frozen=True, array_like=True):
    """Histogram of sequence lengths.

    Attributes:
        counts: Sequences per bin of STARTS; bins behind the last one given are empty.
        tokens: Sum of their lengths per bin.
    """

    counts: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.counts) != len(self.tokens) or len(self.counts) > BINS:
            raise ValueError(f"a digest has up to {BINS} counts and as many sums")
        for index, (count, total) in enumerate(zip(self.counts, self.tokens, strict=True)):
            if count < 0 or total < count * STARTS[index] or (count == 0 and total):
                raise ValueError(f"bin {index} of a digest: {count} sequences cannot have {total} tokens")

    @property
    def sequences(self) -> int:
        return sum(self.counts)


def digest(lengths: Iterable[int]) -> LengthDigest:
    """Digest of lengths, tokens, each at least 0."""
    counts, tokens = [0] * BINS, [0] * BINS
    for length in lengths:
        index = bisect_right(STARTS, length) - 1
        counts[index] += 1
        tokens[index] += length
    used = max((index + 1 for index in range(BINS) if counts[index]), default=0)
    return LengthDigest(tuple(counts[:used]), tuple(tokens[:used]))


def merged(digests: Iterable[LengthDigest]) -> LengthDigest:
    """Sum of digests."""
    counts, tokens = [0] * BINS, [0] * BINS
    for each in digests:
        for index, (count, total) in enumerate(zip(each.counts, each.tokens, strict=True)):
            counts[index] += count
            tokens[index] += total
    used = max((index + 1 for index in range(BINS) if counts[index]), default=0)
    return LengthDigest(tuple(counts[:used]), tuple(tokens[:used]))
