"""The migration handshake, driven by the source's migrator: who asks for it and who must know of it.

    operator, worker, coordinator MigrateSequence, EvacuateInstance     → source's broker (contracts/broker.py)
    source's broker               MoveSequence                          → source's migrator
    source's migrator             LeaseKv, FreezeSequence, EndLease     → source's worker (contracts/leases.py)
    source's migrator             AllotEpoch                            → ingress
    source's migrator             PrepareMigration, PullKv,
                                    SubmitSequence, UnreserveKv         → target's worker
    target's worker               SequenceMoved                         → ingress
    source's migrator             KvReplicated                          → ingress
    source's migrator             MigrationFinished                     → everybody

Ingress, sole owner of the token log, allots the epoch before anything moves and judges at the end: tokens of the new
epoch that begin where its log ends make the target the owner; if the source has thawed and gone on, its log is longer
than where the new epoch begins, and the target is told to stop. So each step may be repeated, lost or late.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from millrace.contracts.broker import MoveReason
from millrace.contracts.kv import KvRefusal
from millrace.contracts.message import Body

#: Under a name of its own: a message that counts ``bytes`` means a number by that.
PackedHashes = bytes


class MigrationMode(StrEnum):
    """Method by which the KV is moved. Only LIVE is for production; the others are what it is compared with."""

    LIVE = "live"  # in rounds while the source decodes on; then the rest of it
    STOP_AND_COPY = "stop_and_copy"  # all of it while the sequence stands still
    RECOMPUTE = "recompute"  # none: the target computes it anew


class MigrateSequence(Body, frozen=True, kw_only=True, tag="MigrateSequence/2"):
    """Asks an instance's broker to move a sequence away. Answered by MigrationFinished when it is over, well or not.

    Attributes:
        target: Instance; empty lets the broker choose it.
        within_ms: A sequence that cannot move yet (it waits, its prompt is not done, no bid comes) may take so long to
            begin.
        mode: None for the migrator's own.
        note: Why, in one sentence, for the migration's span.
    """

    sequence: str
    target: str = ""
    within_ms: int = 2_000
    mode: MigrationMode | None = None
    note: str = ""


class MoveSequence(Body, frozen=True, kw_only=True, tag="MoveSequence/1"):
    """A broker's order to its migrator: move this sequence there. Answered by MigrationFinished.

    Attributes:
        award: Id of the ask that the target's bid answered.
        mode: None for the migrator's own.
        note: Why it moves, and why there, in one sentence.
    """

    sequence: str
    target: str
    reason: MoveReason
    award: str = ""
    mode: MigrationMode | None = None
    note: str = ""


class EvacuateInstance(Body, frozen=True, kw_only=True, tag="EvacuateInstance/2"):
    """Asks an instance's broker to move everything that runs there to wherever there is room. Answered by
    InstanceEvacuated when nothing is left that should move, or at the limit.
    """

    limit_ms: int


class InstanceEvacuated(Body, frozen=True, kw_only=True, tag="InstanceEvacuated/2"):
    """Result of an evacuation.

    Attributes:
        failed: Attempts that did not succeed; their sequences are still there, or were tried again.
        left: Reasons why sequences are still there, and how many for each.
    """

    instance: str
    moved: int
    failed: int
    left: dict[str, int] = {}


class MigrationOutcome(StrEnum):
    """Final state of a migration."""

    MOVED = "moved"
    REFUSED = "refused"  # before anything was frozen
    ABORTED = "aborted"  # the source decodes on
    LOST = "lost"  # the source is gone, or says that it does not have it: in the target's or ingress's hands


class MigrationCost(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Cost of a migration.

    Attributes:
        rounds: Of copying before the freeze.
        matched_blocks: In the target's prefix cache already.
        bytes, descriptors: Of all rounds; the tail is not counted.
        copied_ns: Of all rounds, from first to last byte of each read.
        tokens: Length when it was frozen, prompt included; 0 where it was not.
        frozen_ns: From the freeze to the target's acceptance: no token was decoded meanwhile.
        duration_ns: From the first message to the last.
    """

    copier: str = ""
    rounds: int = 0
    matched_blocks: int = 0
    bytes: int = 0
    descriptors: int = 0
    copied_ns: int = 0
    tokens: int = 0
    frozen_ns: int = 0
    duration_ns: int = 0


class MigrationFinished(Body, frozen=True, kw_only=True, tag="MigrationFinished/2"):
    """Result of a migration.

    Attributes:
        epoch: That the target got; that of the source where none was allotted.
        refusal: With every outcome but MOVED.
        award: As in MoveSequence.
        cost: What it took.
        block_size: Of the blocks that ``block_hashes`` names, tokens; 0 where there are none.
        block_hashes: Chain hashes of the full blocks that the target has since, from the prompt's first on
            (kvcache.chain), packed; empty but with MOVED.
        note: Of who ordered it: why, in one sentence.
    """

    migration: str
    sequence: str
    model: str
    source: str
    target: str
    outcome: MigrationOutcome
    reason: MoveReason
    epoch: int
    refusal: KvRefusal | None = None
    detail: str = ""
    award: str = ""
    mode: MigrationMode = MigrationMode.LIVE
    cost: MigrationCost = MigrationCost()
    block_size: int = 0
    block_hashes: PackedHashes = b""
    note: str = ""


class AllotEpoch(Body, frozen=True, kw_only=True, tag="AllotEpoch/1"):
    """Asks a sequence's ingress for the epoch that the target shall decode in. Answered by EpochAllotted, or
    KvRefused where the sequence has ended, is elsewhere, or ingress knows no such target. A later allotment for the
    same sequence makes the earlier one void.

    Attributes:
        epoch: Present one.
        incarnation: Of the target's worker.
    """

    migration: str
    sequence: str
    epoch: int
    source: str
    target: str
    incarnation: int


class EpochAllotted(Body, frozen=True, kw_only=True, tag="EpochAllotted/1"):
    """The target may decode in this epoch and no other; epochs rise, not always by one.

    Attributes:
        traceparent: Context for what the target does of it, as a submission's by ingress would be; empty for none.
    """

    migration: str
    sequence: str
    epoch: int
    traceparent: str = ""


class SequenceMoved(Body, frozen=True, kw_only=True, tag="SequenceMoved/1"):
    """The target's worker owns the sequence in its allotted epoch and will decode on from ``first_index``.

    Attributes:
        first_index: Number of output tokens that it brought: what the source decoded until it was frozen.
    """

    migration: str
    sequence: str
    epoch: int
    instance: str
    incarnation: int
    first_index: int


class KvReplicated(Body, frozen=True, kw_only=True, tag="KvReplicated/1"):
    """Another instance holds a replica of a sequence's KV, for a continuation. Sent with each round of copying; a later
    one replaces an earlier one.

    Attributes:
        epoch: In which the source decodes the sequence: the replica is of this epoch's tokens.
        replica: Its name, for SubmitSequence.
        instance, incarnation: Of the holder.
        tokens: Tokens, prompt included, whose KV it has.
    """

    sequence: str
    epoch: int
    replica: str
    instance: str
    incarnation: int
    tokens: int
