"""Names full blocks of tokens by a hash over the block and everything before it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from struct import pack, unpack

ROOT = 0x6D696C6C72616365  # parent of a sequence's first block
HASH_BYTES = 8


def chain_hash(parent: int, token_ids: Sequence[int]) -> int:
    """Hash of one full block that follows ``parent``: 64 bits, the same in every process.

    Python's own tuple hash is used because integers are never salted, so it is deterministic, and it is ten times
    faster than a cryptographic one. Two different prefixes meet with a chance of about n² / 2^65 for n blocks: good
    enough for a model, not for deciding which KV to read.
    """
    return hash((parent, *token_ids))


def salted_root(salt: str) -> int:
    """Parent of the first block of sequences with this salt; ROOT for none."""
    return int.from_bytes(blake2b(salt.encode(), digest_size=7).digest()) if salt else ROOT


def extend_chain(hashes: list[int], token_ids: Sequence[int], block_size: int, root: int = ROOT) -> None:
    """Appends the hashes of all full blocks of ``token_ids`` that ``hashes`` does not cover yet."""
    parent = hashes[-1] if hashes else root
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        parent = chain_hash(parent, token_ids[start : start + block_size])
        hashes.append(parent)


def pack_hashes(hashes: Sequence[int]) -> bytes:
    """Hashes as they travel: 8 bytes each, little-endian, signed."""
    return pack(f"<{len(hashes)}q", *hashes)


@lru_cache(maxsize=16)  # the same bytes are asked about at each candidate, then placed
def unpack_hashes(packed: bytes) -> tuple[int, ...]:
    """The hashes again; a broken end is cut off."""
    count = len(packed) // HASH_BYTES
    return unpack(f"<{count}q", packed[: count * HASH_BYTES])
