"""KV blocks between engines: where they lie, how they are read, and what a moved sequence brings of them.

What a worker is asked about them by its migrator is in leases.py.

Block indices are of two kinds. A *position* counts a sequence's blocks from 0 (tokens ``position * block_tokens`` on);
a *block id* names a block of one engine's cache. ``from_block`` is a position. ``blocks`` is a list of *rows*, one per
position: the source's block ids of that position in each group of layers, in the order of ``KvEndpoint.groups``, and
``NO_BLOCK`` where the sequence needs none of a group. Where all layers keep the same, a row is one id.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

_MS = 1_000_000

#: Stands for the checksum of a row that was left out of a sample.
UNSUMMED = -1
_UNBOUNDED = 1 << 40
#: Stands for a block in a row: none is needed. No engine gives this one to a sequence.
NO_BLOCK = 0


class CopierKind(StrEnum):
    """Mechanism that copies KV bytes between two engines."""

    SHARED_MEMORY = "shared_memory"  # both map the source's memfd: one host, containers included
    NIXL = "nixl"  # whatever UCX finds; between GPUs of one host CUDA's peer copies
    MODELLED = "modelled"  # no bytes: a network model says how long they would take


class KvNeed(StrEnum):
    """Blocks of a group that a sequence goes on with."""

    ALL = "all"  # one for all tokens of each block: full attention, MLA
    WINDOW = "window"  # those of the last tokens: sliding window, chunked local attention
    STATE = "state"  # one, rewritten with every token: Mamba, GDN, short convolution


class KvGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers whose blocks are taken together.

    Attributes:
        block_tokens: Of one of its blocks. A row names one block of a state, and of others as many as a position has.
        block_bytes: Of one of its blocks over all planes and ranks.
        window: Last tokens that are needed; 0 where it is none.
    """

    need: KvNeed
    block_tokens: int
    block_bytes: int
    window: int = 0

    @property
    def blocks_max(self) -> int:
        """Most blocks that a sequence which decodes holds of it, however long."""
        match self.need:
            case KvNeed.ALL:
                return _UNBOUNDED
            case KvNeed.WINDOW:
                return max(0, self.window - 2) // self.block_tokens + 2
            case KvNeed.STATE:
                return 1

    def blocks_in_step(self, computed: int, end: int) -> int:
        """Blocks of it in a step that computes tokens from one position up to another."""
        if self.need is KvNeed.STATE:
            return 1
        left = max(0, computed - self.window + 1) // self.block_tokens if self.need is KvNeed.WINDOW else 0
        return -(-end // self.block_tokens) - left


class KvPlane(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of KV: the bytes of block ``b`` are ``[offset + b * stride, offset + b * stride + bytes)``.

    Attributes:
        offset: Of block 0 in the rank's region, bytes.
        stride: From one block to the next, bytes.
        bytes: Of one block. Equal to ``stride`` where neighbours are contiguous.
    """

    offset: int
    stride: int
    bytes: int


class KvRank(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The KV region of one process of an engine (one per tensor-parallel rank) and the ways to read it.

    Attributes:
        planes: In the order of layers, group by group; groups that lie in the same ones name them once. The same order
            on every engine of one fingerprint.
        region_bytes: Size of the region that offsets point into.
        socket: Unix socket that hands out the region's memfd; empty for none.
        device: Number of the GPU, -1 for host memory.
        handles: Copier kind -> its connection data (the incarnation of a region, NIXL agent metadata).
    """

    planes: list[KvPlane]
    region_bytes: int
    socket: str = ""
    device: int = -1
    handles: dict[str, bytes] = {}


class KvEndpoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything another engine must know to read this one's KV. Part of InstanceRecord.

    Attributes:
        fingerprint: Hash of weights' identity, dtype, heads, layers, groups, block size, layout and parallelism: KV
            moves between engines of equal fingerprints only.
        machine: Boot id of the host; shared memory needs equal ones. Empty for none.
        copiers: Kinds offered, best first.
        block_tokens: Tokens per position.
        block_bytes: Bytes that a sequence grows by per position, over all planes and ranks.
        blocks: Block ids are below this.
        segments: Whether the allocator prefers contiguous runs.
        freeze_ms_max: No freeze of its sequences is longer, whatever is asked for; 0 where it does not say.
        groups: In the order of a row's columns; empty for one that needs all.
    """

    fingerprint: str
    block_tokens: int
    block_bytes: int
    blocks: int
    copiers: list[CopierKind]
    ranks: list[KvRank] = []
    machine: str = ""
    segments: bool = False
    freeze_ms_max: int = 0
    groups: list[KvGroup] = []

    @property
    def whole_only(self) -> bool:
        """Whether a sequence can only go on from its KV where all of it is there: a state is that of its last token."""
        return any(group.need is KvNeed.STATE for group in self.groups)


class KvHandover(msgspec.Struct, frozen=True, kw_only=True):
    """KV of a sequence that a target has, and KV that it must still read, when it takes the sequence.

    Positions below ``from_block`` were pulled, or matched in the target's prefix cache. The rest, including the partial
    tail, is read before the first step. Blocks that cannot be read, or fail their check, are recomputed.

    Attributes:
        migration: Names the reservation at the target.
        endpoint: Of the source.
        blocks: Rows of positions ``from_block``, ``from_block + 1``, ... up to the tail.
        checksums: Per rank, one per row of ``blocks`` (CRC-32C over the planes of its block in order; of several
            blocks, the CRC-32 of theirs), -1 for those left out of a sample; empty where none is verified.
        computed_tokens: Tokens whose KV the source has: all but the last one, as a rule.
        read_ms: The source keeps the sequence frozen for so long from the asking on; a read that ends later is void.
        until_ns: And so is one that ends after this, by the clock of the target's worker; 0 where none is given. See
            ``read_until_ns``.
    """

    migration: str
    endpoint: KvEndpoint
    from_block: int
    blocks: list[list[int]]
    computed_tokens: int
    read_ms: int
    checksums: list[list[int]] = []
    until_ns: int = 0


def read_until_ns(received_ns: int, *, read_ms: int, until_ns: int) -> int:
    """Return the deadline of a read, unix ns by the reader's clock. A read that ends later does not count.

    A deadline from ``read_ms`` alone is too late by the time that the request was in transit. ``until_ns`` is not: the
    source's migrator derived it from the reader's own clock, as shown in an earlier answer (MigrationPrepared.at_ns).
    The reader is the target's worker with its engine, two processes of one host. If the host's clock was stepped since
    the worker started, the engine's clock differs from the worker's. ``until_ns`` is then early or late by that
    difference, and ``read_ms`` still bounds the read.

    Args:
        received_ns: When the question came.
        until_ns: 0 for none.
    """
    by_span_ns = received_ns + max(0, read_ms) * _MS
    return min(by_span_ns, until_ns) if until_ns else by_span_ns


class KvRefusal(StrEnum):
    """Reason why a lease, reservation, pull or freeze was refused, or a migration ended. Closed set."""

    UNKNOWN_SEQUENCE = "unknown_sequence"  # not here, or in another epoch, or it has ended
    NOT_RUNNING = "not_running"  # waiting, preempted, or its prompt is not done: try again later
    IMMOVABLE = "immovable"  # something of it cannot be carried; the status snapshot says what
    LEASE_LOST = "lease_lost"  # preempted or ended under its lease, or the lease's time is over
    NO_BLOCKS = "no_blocks"  # too few idle blocks at the target
    TOO_MANY = "too_many"  # three transfers in, or out, already
    INCOMPATIBLE = "incompatible"  # fingerprints differ, or no copier in common
    UNABLE = "unable"  # this engine moves nothing: its self-test failed, or migration is off
    COPY_FAILED = "copy_failed"  # the read failed, or a checksum did not match
    TARGET_REFUSED = "target_refused"  # its worker drains, is full, or knows a newer epoch
    EPOCH_REFUSED = "epoch_refused"  # ingress did not allot an epoch: ended, or it moves already
    UNANSWERED = "unanswered"  # a peer did not answer in time
    CANCELLED = "cancelled"  # the sequence was cancelled, or the migration aborted
    NO_BID = "no_bid"  # no bid of that name is open at the target: it has expired, or was never given
    NO_TARGET = "no_target"  # no other instance serves this model, or none has room
    INVALID = "invalid"  # source and target are the same, unknown migration, contradictory fields


def blocks_for(tokens: int, block_size: int, groups: Sequence[KvGroup] = ()) -> int:
    """KV blocks that a sequence of so many tokens holds while it decodes: of each group, or of one that keeps all."""
    if not groups:
        return -(-tokens // block_size)
    return sum(min(-(-tokens // group.block_tokens), group.blocks_max) for group in groups)


def compatible(source: KvEndpoint | None, target: KvEndpoint | None) -> bool:
    """Whether KV can move between two endpoints: both have some, of one fingerprint, with a copier in common."""
    if source is None or target is None or source.fingerprint != target.fingerprint:
        return False
    return not set(source.copiers).isdisjoint(target.copiers)
