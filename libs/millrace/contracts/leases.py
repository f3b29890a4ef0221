"""Requests about KV from a source's migrator to two workers, with their answers: leases and freezes at the source,
room and pulls at the target.

Each request may be repeated. A repeated lease is renewed, a repeated freeze is answered with the same tokens, and a
repeated preparation or pull is answered with its earlier result. Positions and block ids are as in kv.py.
"""

from __future__ import annotations

import msgspec

from millrace.contracts.ingress import TokenLogprobs
from millrace.contracts.kv import CopierKind, KvEndpoint, KvRefusal
from millrace.contracts.message import Body
from millrace.contracts.worker import Adapter, SubmitSequence


class LeaseKv(Body, frozen=True, kw_only=True, tag="LeaseKv/1"):
    """Asks the source's worker for a running sequence's full blocks, pinned for a time. Repeating it renews the lease
    and tells the blocks filled since. Answered by KvLeased or KvRefused.

    Attributes:
        migration: Names the lease.
        epoch: -1 at first: whoever knows a sequence from a snapshot does not know its epoch; the answer tells it.
        from_block: First position wanted.
        lease_ms: How long the blocks stay pinned after the last renewal.
    """

    migration: str
    sequence: str
    epoch: int
    from_block: int
    lease_ms: int


class LeasedBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """Full blocks of a running sequence, unchanged as long as the lease holds.

    Attributes:
        blocks: Rows of positions ``from_block`` on; full ones only.
        checksums: As in KvHandover.
        prompt_tokens, output_tokens: Lengths now.
        computed_tokens: Tokens whose KV is there.
    """

    migration: str
    sequence: str
    from_block: int
    blocks: list[list[int]]
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int
    checksums: list[list[int]] = []


class KvLeased(Body, LeasedBlocks, frozen=True, kw_only=True, tag="KvLeased/2"):
    """The engine's answer to a lease, with what the worker knows beyond it. Travels in the trace of its submission.

    Attributes:
        epoch: In which the instance holds the sequence.
        submission: Where ``from_block`` is 0: the sequence as its ingress submitted it, with every output token so
            far; without a handover of its own.
        endpoint: Where ``from_block`` is 0: how this instance's KV is read.
    """

    epoch: int
    submission: SubmitSequence | None = None
    endpoint: KvEndpoint | None = None


class FreezeSequence(Body, frozen=True, kw_only=True, tag="FreezeSequence/2"):
    """Asks the source's worker to stop decoding a leased sequence, keeping it whole. Answered by SequenceFrozen or
    KvRefused; by KvLeased where more than ``new_blocks_max`` blocks are full from ``from_block`` on: then the lease is
    renewed and another round of copying comes first. A frozen one decodes on by itself (thaw) after ``freeze_ms``.

    Attributes:
        new_blocks_max: None freezes it whatever is full.
        lease_ms: As in LeaseKv.
    """

    migration: str
    sequence: str
    epoch: int
    from_block: int
    freeze_ms: int
    new_blocks_max: int | None = None
    lease_ms: int = 0


class FrozenBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence that stands still.

    Attributes:
        blocks: Rows of positions ``from_block`` on, up to that of the state or the partial tail.
        output_token_ids: All of them, over all epochs.
        computed_tokens: Tokens whose KV is there: all but the last one.
        frozen_ns: Unix ns, on the source's clock.
        checksums: As in KvHandover.
    """

    migration: str
    sequence: str
    from_block: int
    blocks: list[list[int]]
    output_token_ids: list[int]
    computed_tokens: int
    frozen_ns: int
    checksums: list[list[int]] = []


class SequenceFrozen(Body, FrozenBlocks, frozen=True, kw_only=True, tag="SequenceFrozen/2"):
    """The sequence stands still; every token of it has been sent to its ingress.

    Attributes:
        logprobs: Of the last ``len(logprobs)`` tokens, where asked for: those that ingress may still miss.
    """

    epoch: int
    logprobs: list[TokenLogprobs] | None = None


class EndLease(Body, frozen=True, kw_only=True, tag="EndLease/2"):
    """Ends a lease at the source. No answer: where it is lost, the lease ends at its deadline.

    Attributes:
        epoch: As in LeaseKv: -1 where no answer told it.
        moved: The target decodes it: the sequence is let go and its blocks are freed. Otherwise a frozen sequence
            decodes on.
    """

    migration: str
    sequence: str
    epoch: int
    moved: bool


class WantedRoom(msgspec.Struct, frozen=True, kw_only=True):
    """Idle blocks for a sequence to come.

    Attributes:
        endpoint: Of the source: its fingerprint is compared, its copiers are matched.
        token_ids: Prompt and output so far: what the target's prefix cache has of it need not travel. The first one
            alone where blocks of such tokens are not the sequence's: it has a salt or images.
        blocks: To reserve: for the whole of it now, and some to grow.
        replica: For a KV replica: the sequence goes on at its source, in this epoch. The reservation takes no place in
            the batch, grows with each pull, and is given up as soon as its blocks are needed for anything else.
        adapter: LoRA adapter of the sequence; None for none.
    """

    migration: str
    sequence: str
    endpoint: KvEndpoint
    token_ids: list[int]
    blocks: int
    replica: bool = False
    adapter: Adapter | None = None


class PrepareMigration(Body, WantedRoom, frozen=True, kw_only=True, tag="PrepareMigration/3"):
    """Asks the target's worker for idle blocks for a sequence to come, and to read the first of its full blocks.
    Answered by MigrationPrepared or KvRefused.

    Attributes:
        epoch: That it will come with.
        reserve_ms: How long they stay reserved without news.
        pull: Rows of the first positions: those that the prefix cache has not are read.
        checksums: Of them, as in KvLeased.
        read_ms: As in PullKv.
        award: The target's bid that this takes up; empty for a move by order and for a KV replica.
    """

    epoch: int
    reserve_ms: int
    pull: list[list[int]] = []
    checksums: list[list[int]] = []
    read_ms: int = 0
    award: str = ""


class MigrationPrepared(Body, frozen=True, kw_only=True, tag="MigrationPrepared/2"):
    """Blocks are reserved, and the first ones read.

    Attributes:
        matched_blocks: Positions below this are in the target's prefix cache, and pinned.
        copier: What carries the rest.
        blocks: Read, from ``matched_blocks`` on.
        bytes, descriptors, duration_ns: Of that, as in KvPulled.
        at_ns: What the worker's clock showed when its engine had answered, unix ns; 0 where it does not say. A repeated
            answer shows the first one's.
    """

    migration: str
    matched_blocks: int
    copier: CopierKind
    blocks: int = 0
    bytes: int = 0
    descriptors: int = 0
    duration_ns: int = 0
    at_ns: int = 0


class PullKv(Body, frozen=True, kw_only=True, tag="PullKv/3"):
    """Asks the target's worker to read full blocks from the source into its reservation. Answered by KvPulled or
    KvRefused.

    Attributes:
        blocks, checksums: As in KvLeased.
        read_ms: The lease holds for so long from the asking on; a read that ends later is void.
        round: Of copying, counted from 1.
        lease: Lease under which the source holds the blocks; empty where it is named as the migration.
        proven: Positions below this were read under leases that held until all was read: those of a KV replica that a
            continuation may begin on.
    """

    migration: str
    from_block: int
    blocks: list[list[int]]
    read_ms: int
    checksums: list[list[int]] = []
    round: int = 1
    lease: str = ""
    proven: int = 0


class ReadBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that were read.

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


class KvPulled(Body, ReadBlocks, frozen=True, kw_only=True, tag="KvPulled/1"):
    """The blocks are in the target's cache, checked where they came with checksums.

    Attributes:
        at_ns: As in MigrationPrepared.
    """

    at_ns: int = 0


class UnreserveKv(Body, frozen=True, kw_only=True, tag="UnreserveKv/1"):
    """Frees a reservation whose sequence did not come. No answer; an unknown one is no error."""

    migration: str


class KvRefused(Body, frozen=True, kw_only=True, tag="KvRefused/1"):
    """A worker's no to any of the above, and an ingress's to AllotEpoch."""

    migration: str
    reason: KvRefusal
    detail: str = ""
