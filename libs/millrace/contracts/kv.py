"""KV blocks between engines: where they lie, and what a worker is asked about them by its migrator.

Block indices are of two kinds. A *position* counts a sequence's blocks from 0 (tokens ``position * block_tokens`` on);
a *block id* names a block of one engine's cache. ``from_block`` is a position, ``blocks`` are ids of the source.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from millrace.contracts.ingress import TokenLogprobs
from millrace.contracts.message import Body


class CopierKind(StrEnum):
    """How KV bytes travel between two engines."""

    SHARED_MEMORY = "shared_memory"  # both map the source's memfd: one host, containers included
    CROSS_MEMORY = "cross_memory"  # process_vm_readv: one host, where ptrace is permitted
    CUDA = "cuda"  # IPC handles and peer copies: one host
    VERBS = "verbs"  # RDMA READ
    NIXL = "nixl"  # whatever UCX finds
    MODELLED = "modelled"  # no bytes: a network model says how long they would take


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
        planes: In the order of layers; the same order on every engine of one fingerprint.
        region_bytes: Size of the region that offsets point into.
        pid: Process that owns it.
        address: Where the region begins in that process's memory (cross-memory attach); 0 where it must not be used.
        socket: Unix socket that hands out the region's memfd; empty for none.
        device: Number of the GPU, -1 for host memory.
        handles: Copier kind -> its connection data (CUDA IPC handle, NIXL agent metadata, queue pair address).
    """

    planes: list[KvPlane]
    region_bytes: int
    pid: int = 0
    address: int = 0
    socket: str = ""
    device: int = -1
    handles: dict[str, bytes] = {}


class KvEndpoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything another engine must know to read this one's KV. Part of InstanceRecord.

    Attributes:
        fingerprint: Hash of weights' identity, dtype, heads, layers, block size, layout and parallelism: KV moves
            between engines of equal fingerprints only.
        machine: Boot id of the host; shared memory and cross-memory attach need equal ones. Empty for none.
        copiers: Kinds offered, best first.
        block_tokens: Tokens per block.
        block_bytes: Bytes of one block over all planes and ranks.
        blocks: Block ids are below this.
        segments: Whether the allocator prefers contiguous runs.
    """

    fingerprint: str
    block_tokens: int
    block_bytes: int
    blocks: int
    copiers: list[CopierKind]
    ranks: list[KvRank] = []
    machine: str = ""
    segments: bool = False


class KvHandover(msgspec.Struct, frozen=True, kw_only=True):
    """What of a sequence's KV a target has, and what it still must read, when it takes the sequence.

    Positions below ``from_block`` were pulled, or matched in the target's prefix cache. The rest, the partial tail
    included, is read before the first step; whatever cannot be read, or fails its check, is recomputed.

    Attributes:
        migration: Names the reservation at the target.
        endpoint: Of the source.
        blocks: Source block ids of positions ``from_block``, ``from_block + 1``, ... up to the tail.
        checksums: Per rank, one per block of ``blocks`` (CRC-32C over its planes in order); empty where not verified.
        computed_tokens: Tokens whose KV the source has: all but the last one, as a rule.
        read_ms: The source keeps the sequence frozen for so long from the asking on; a read that ends later is void.
    """

    migration: str
    endpoint: KvEndpoint
    from_block: int
    blocks: list[int]
    computed_tokens: int
    read_ms: int
    checksums: list[list[int]] = []


class KvRefusal(StrEnum):
    """Why a lease, reservation, pull or freeze was refused, or a migration ended. Closed set."""

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
    NO_TARGET = "no_target"  # nobody else serves this model, or nobody has room
    INVALID = "invalid"  # source and target are the same, unknown migration, contradictory fields


class LeaseKv(Body, frozen=True, kw_only=True, tag="LeaseKv/1"):
    """Asks the source's worker for a running sequence's full blocks, pinned for a time. Repeating it renews the lease
    and tells the blocks filled since. Answered by KvLeased or KvRefused.

    Attributes:
        migration: Names the lease.
        from_block: First position wanted.
        lease_ms: How long the blocks stay pinned after the last renewal.
    """

    migration: str
    sequence: str
    epoch: int
    from_block: int
    lease_ms: int


class KvLeased(Body, frozen=True, kw_only=True, tag="KvLeased/1"):
    """Full blocks of a running sequence, unchanged as long as the lease holds.

    Attributes:
        blocks: Source block ids of positions ``from_block`` on; full ones only.
        checksums: As in KvHandover.
        prompt_tokens, output_tokens: Lengths now.
        computed_tokens: Tokens whose KV is there.
    """

    migration: str
    sequence: str
    epoch: int
    from_block: int
    blocks: list[int]
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int
    checksums: list[list[int]] = []


class FreezeSequence(Body, frozen=True, kw_only=True, tag="FreezeSequence/1"):
    """Asks the source's worker to stop decoding a leased sequence, keeping it whole. Answered by SequenceFrozen or
    KvRefused. Without EndLease within ``freeze_ms`` it decodes on by itself (thaw).
    """

    migration: str
    sequence: str
    epoch: int
    from_block: int
    freeze_ms: int


class SequenceFrozen(Body, frozen=True, kw_only=True, tag="SequenceFrozen/1"):
    """The sequence stands still; every token of it has been sent to its ingress.

    Attributes:
        output_token_ids: All of them, over all epochs.
        logprobs: Of the last ``len(logprobs)`` tokens, where asked for: those that ingress may still miss.
        blocks: Source block ids of positions ``from_block`` on, the partial tail included.
        computed_tokens: Tokens whose KV is there: all but the last one.
        frozen_ns: Unix ns, on the source's clock.
    """

    migration: str
    sequence: str
    epoch: int
    from_block: int
    blocks: list[int]
    output_token_ids: list[int]
    computed_tokens: int
    frozen_ns: int
    checksums: list[list[int]] = []
    logprobs: list[TokenLogprobs] | None = None


class EndLease(Body, frozen=True, kw_only=True, tag="EndLease/1"):
    """Ends a lease at the source. Answered by LeaseEnded, also where it had ended already.

    Attributes:
        moved: The target decodes it: the sequence is let go and its blocks are freed. Otherwise a frozen sequence
            decodes on.
    """

    migration: str
    sequence: str
    epoch: int
    moved: bool


class LeaseEnded(Body, frozen=True, kw_only=True, tag="LeaseEnded/1"):
    """The lease is over.

    Attributes:
        held: The lease had held until now: whatever was read under it is good.
    """

    migration: str
    held: bool


class ReserveKv(Body, frozen=True, kw_only=True, tag="ReserveKv/1"):
    """Asks the target's worker for idle blocks for a sequence to come. Answered by KvReserved or KvRefused.

    Attributes:
        epoch: That it will come with.
        endpoint: Of the source: its fingerprint is compared, its copiers are matched.
        token_ids: Prompt and output so far: what the target's prefix cache has of it need not travel.
        blocks: Blocks for the whole of it now, and some to grow.
        reserve_ms: How long they stay reserved without news.
    """

    migration: str
    sequence: str
    epoch: int
    endpoint: KvEndpoint
    token_ids: list[int]
    blocks: int
    reserve_ms: int


class KvReserved(Body, frozen=True, kw_only=True, tag="KvReserved/1"):
    """Blocks are reserved.

    Attributes:
        matched_blocks: Positions below this are in the target's prefix cache, and pinned.
        copier: What will carry the rest.
    """

    migration: str
    matched_blocks: int
    copier: CopierKind


class PullKv(Body, frozen=True, kw_only=True, tag="PullKv/1"):
    """Asks the target's worker to read full blocks from the source into its reservation. Answered by KvPulled or
    KvRefused.

    Attributes:
        blocks, checksums: As in KvLeased.
        read_ms: The lease holds for so long from the asking on; a read that ends later is void.
    """

    migration: str
    from_block: int
    blocks: list[int]
    read_ms: int
    checksums: list[list[int]] = []


class KvPulled(Body, frozen=True, kw_only=True, tag="KvPulled/1"):
    """The blocks are in the target's cache, checked where they came with checksums.

    Attributes:
        descriptors: Pieces that the transfer consisted of.
        duration_ns: From the first byte to the last.
    """

    migration: str
    from_block: int
    blocks: int
    bytes: int
    descriptors: int
    duration_ns: int
    copier: CopierKind


class UnreserveKv(Body, frozen=True, kw_only=True, tag="UnreserveKv/1"):
    """Frees a reservation whose sequence did not come. No answer; an unknown one is no error."""

    migration: str


class KvRefused(Body, frozen=True, kw_only=True, tag="KvRefused/1"):
    """A worker's no to any of the above."""

    migration: str
    reason: KvRefusal
    detail: str = ""
