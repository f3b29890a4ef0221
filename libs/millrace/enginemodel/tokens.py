"""What a modelled engine says: tokens that are a pure function of prompt, seed and position.

The same prompt and seed give the same tokens on any instance, from any position on, whatever else runs: what greedy
decoding gives on a real engine. The output ends by itself at a length that the prompt decides, spread like a
log-normal distribution, as lengths of real answers are.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Sequence
from statistics import NormalDist

import msgspec

CHUNK = 64  # tokens made at once: one hash call is then a few nanoseconds per token
_SPREAD = NormalDist()


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """Which token ids a modelled engine uses.

    Attributes:
        size: Number of ids of the tokenizer, a prompt with an id past it is refused; None where it is not known.
        eos_token_id: Ends an output.
        letters: Ids of text pieces that read as letters.
        spaces: Ids that read as a space or line end.
    """

    size: int | None = None
    eos_token_id: int = 0
    letters: tuple[int, ...] = tuple(range(97, 123))
    spaces: tuple[int, ...] = (32,)

    def table(self) -> list[int]:
        """256 ids, one for each value of a byte: about one in six a space."""
        spaces = [self.spaces[index % len(self.spaces)] for index in range(256)]
        letters = [self.letters[index % len(self.letters)] for index in range(256)]
        return [spaces[index] if index % 6 == 5 else letters[index] for index in range(256)]


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


def stream_key(prompt_token_ids: Sequence[int], seed: int | None) -> bytes:
    """What a sequence's tokens depend on: prompt and seed, nothing else."""
    digest = hashlib.blake2b(array("q", prompt_token_ids).tobytes(), digest_size=16)
    if seed is not None:
        digest.update(b"seed" + seed.to_bytes(16, "big", signed=True))
    return digest.digest()


def stream_chunk(key: bytes, chunk: int, table: Sequence[int]) -> list[int]:
    """Output tokens ``chunk * CHUNK`` to ``(chunk + 1) * CHUNK - 1``."""
    noise = hashlib.shake_128(key + chunk.to_bytes(8, "big")).digest(CHUNK)
    return [table[byte] for byte in noise]
