"""Output tokens of a modelled engine: each token is a function of the KV before it, and of the seed.

A digest stands for the KV. It rolls over the tokens in the order in which their KV lies in the sequence's blocks. Right
KV gives the digest of the right tokens, and with it the same tokens on any instance, from any position on, whatever
else runs, as greedy decoding does on a real engine. Blocks that are stale, torn, missing or misplaced give another
digest (contents.py), and other tokens from there on. The output ends by itself at a length that prompt and seed
decide. These lengths have a log-normal distribution, like those of real answers.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist
from zlib import crc32

import msgspec

#: Digest of no KV at all.
ROOT = 0x6B76
#: Bytes that stand for the KV of one token.
WORD_BYTES = 8
#: Spreads a digest over the bits that choose a token: CRC-32 alone is linear. Odd, from the golden ratio.
MIX = 0x9E3779B97F4A7C15
_SPREAD = NormalDist()


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids that a modelled engine uses.

    Attributes:
        size: Number of ids of the tokenizer, a prompt with an id past it is refused; None where it is not known.
        letters: Ids of text pieces that read as letters.
        spaces: Ids that read as a space or line end.
    """

    size: int | None = None
    eos_token_id: int = 0
    letters: tuple[int, ...] = tuple(range(97, 123))
    spaces: tuple[int, ...] = (32,)

    def table(self) -> list[int]:
        """256 ids, one for each value of a byte: about one in six a space."""
        return list(_table(self.letters, self.spaces))


@lru_cache(maxsize=64)  # each engine has one of its own, of the same few vocabularies
def _table(letters: tuple[int, ...], spaces: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(
        spaces[index % len(spaces)] if index % 6 == 5 else letters[index % len(letters)] for index in range(256)
    )


class OutputLengths(msgspec.Struct, frozen=True, kw_only=True):
    """Spread of natural output lengths, EOS included.

    Attributes:
        mean: Mean length, tokens.
        sigma: Standard deviation of the logarithm; 0 for equal lengths.
        length_max: Longest length.
    """

    mean: float = 128.0
    sigma: float = 0.8
    length_max: int = 1_000_000

    def length(self, key: bytes) -> int:
        """Length for the sequence with this key, at least 1."""
        number = int.from_bytes(hashlib.blake2b(key, digest_size=8, person=b"length").digest(), "big")
        share = (number + 0.5) / 2**64
        mu = math.log(self.mean) - self.sigma**2 / 2
        return max(1, min(self.length_max, round(math.exp(mu + self.sigma * _SPREAD.inv_cdf(share)))))


def kv_words(token_ids: Sequence[int]) -> bytes:
    """Return the bytes that stand for the KV of these tokens: WORD_BYTES of each."""
    return array("q", token_ids).tobytes()


def kv_digest(token_ids: Sequence[int], before: int = ROOT) -> int:
    """Digest of the KV of these tokens behind KV with the digest ``before``. However they are cut into parts, the end
    is the same; about a nanosecond per byte.
    """
    return crc32(kv_words(token_ids), before)


def next_token(digest: int, salt: int, table: Sequence[int]) -> int:
    """The token that follows KV with this digest, out of the 256 of ``table``."""
    return table[((digest ^ salt) * MIX >> 40) & 255]


def seed_salt(seed: int | None) -> int:
    """Return a salt that tells sequences with a seed from those without, and seeds from each other."""
    return 0 if seed is None else crc32(b"seed" + seed.to_bytes(16, "big", signed=True))


def stream_key(prompt_token_ids: Sequence[int], seed: int | None) -> bytes:
    """Return the key that decides a sequence's length. It depends on prompt and seed, nothing else."""
    digest = hashlib.blake2b(array("q", prompt_token_ids).tobytes(), digest_size=16)
    if seed is not None:
        digest.update(b"seed" + seed.to_bytes(16, "big", signed=True))
    return digest.digest()
