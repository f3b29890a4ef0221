"""The Copier port: reads blocks out of another engine's KV region into one's own.

The target reads (it knows when it has room and time); the source does nothing but keep its region open. A copier lives
in the process that owns the target's region, one per tensor-parallel rank. Contract suite: tests/contract/copier.

    region   = ... the own KV memory (memory.py)                       once
    copier   = SharedMemoryCopier(region); rank = copier.offer(rank)   once; the rank goes into the KvEndpoint
    link     = copier.connect(peer_rank)                               once per peer, kept and closed by the owner
    transfer = link.begin(plan(peer_rank, theirs, rank, mine))         per pull
    while not transfer.advance(bytes_max): ...                         between engine steps
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from millrace.contracts.kv import CopierKind, KvRank

Offsets = npt.NDArray[np.int64]


class CopierError(Exception):
    """A peer cannot be reached this way, or a read failed; the message says which and why. What a failed read left in
    the target's blocks is garbage.
    """


class CopyPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Descriptors of one transfer, merged as far as both sides' runs allow.

    Attributes:
        source: Byte offsets in the source's region, shape (n,).
        target: Byte offsets in the target's region, shape (n,).
        lengths: Bytes of each piece, shape (n,).
    """

    source: Offsets
    target: Offsets
    lengths: Offsets

    @property
    def descriptors(self) -> int:
        return len(self.lengths)

    @property
    def bytes(self) -> int:
        return int(self.lengths.sum())


class Transfer(Protocol):
    """One read under way."""

    def advance(self, bytes_max: int) -> bool:
        """Goes on: copiers that copy with the caller's processor copy at most ``bytes_max``, asynchronous ones look.

        Returns: whether all of it is there. Raises CopierError: it failed; the transfer is over.
        """
        ...

    def cancel(self) -> None:
        """Ends it; when this returns nothing writes to the target any more. Idempotent."""
        ...


class Link(Protocol):
    """A connection to one peer's region."""

    def begin(self, plan: CopyPlan) -> Transfer:
        """Starts a read. Raises CopierError: offsets outside either region, or the peer is gone."""
        ...

    def close(self) -> None:
        """Gives up mappings, registrations and descriptors. Idempotent."""
        ...


class Copier(Protocol):
    """One way to read other engines' KV."""

    kind: CopierKind

    def offer(self, rank: KvRank) -> KvRank:
        """The own rank with what peers need to read it this way."""
        ...

    def connect(self, peer: KvRank) -> Link:
        """Opens a peer's region. Raises CopierError: it is not reachable this way."""
        ...

    def close(self) -> None:
        """Gives up everything that it owns. Idempotent."""
        ...
