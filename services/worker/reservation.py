"""State of one reservation at a worker, and what a continuation gets of one that is a KV replica. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from millrace.actor.engine import KvBlocksRead, KvRoomReserved
from millrace.contracts.kv import KvHandover
from millrace.contracts.leases import KvPulled, MigrationPrepared, PrepareMigration, PullKv
from millrace.contracts.worker import SubmitSequence

from services.worker.questions import Questions


@dataclass(slots=True, kw_only=True)
class SequenceReservation:
    """Room for one sequence.

    Attributes:
        asked: What it was made for.
        until_ns: When it ends without news.
        blocks: Positions that it has room for; those of a replica grow.
        proven: As in PullKv.
        room: What the engine reserved; None before.
        granted: The answer to the preparation.
        last: The last pull that was answered well, with the answer.
    """

    asked: PrepareMigration
    reserve_ns: int
    until_ns: int
    blocks: int
    proven: int = 0
    room: KvRoomReserved | None = None
    granted: MigrationPrepared | None = None
    last: tuple[PullKv, KvPulled] | None = None
    questions: Questions = field(default_factory=Questions)

    @property
    def migration(self) -> str:
        return self.asked.migration

    @property
    def sequence(self) -> str:
        return self.asked.sequence

    @property
    def epoch(self) -> int:
        """Epoch that it comes with; of a replica, in which its source decodes it."""
        return self.asked.epoch

    @property
    def replica(self) -> bool:
        """Whether it is a KV replica."""
        return self.asked.replica


def handover_of(reservation: SequenceReservation, body: SubmitSequence) -> KvHandover | None:
    """The handover of a sequence that continues on its replica: proven blocks, and nothing left to read. None where
    nothing of it is of use.

    Only full blocks of tokens that ingress knows count: the source may have decoded further ones, which a continuation
    need not repeat.
    """
    block_tokens = reservation.asked.endpoint.block_tokens
    known = (len(body.prompt_token_ids) + len(body.output_token_ids) - 1) // block_tokens
    blocks = min(reservation.proven, known)
    if reservation.granted is None or blocks < 1:
        return None
    return KvHandover(
        migration=reservation.migration,
        endpoint=reservation.asked.endpoint,
        from_block=blocks,
        blocks=[],
        computed_tokens=blocks * block_tokens,
        read_ms=0,
    )


def nothing_pulled(body: PullKv, granted: MigrationPrepared, now_ns: int) -> KvPulled:
    """The answer to a pull of no block, which only renews."""
    return KvPulled(
        migration=body.migration,
        from_block=body.from_block,
        blocks=0,
        bytes=0,
        descriptors=0,
        duration_ns=0,
        copier=granted.copier,
        at_ns=now_ns,
    )


def first_blocks(body: PrepareMigration, room: KvRoomReserved) -> PullKv | None:
    """The read that a preparation asks for, less what the prefix cache has; None where nothing is left of it."""
    matched = room.matched_blocks
    if matched >= len(body.pull):
        return None
    return PullKv(
        migration=body.migration,
        from_block=matched,
        blocks=body.pull[matched:],
        checksums=[rank[matched:] for rank in body.checksums],
        read_ms=body.read_ms,
    )


def prepared(room: KvRoomReserved, read: KvBlocksRead | None, now_ns: int) -> MigrationPrepared:
    """The answer to a preparation: the room, and what was read into it."""
    return MigrationPrepared(
        migration=room.migration,
        matched_blocks=room.matched_blocks,
        copier=room.copier,
        blocks=read.blocks if read is not None else 0,
        bytes=read.bytes if read is not None else 0,
        descriptors=read.descriptors if read is not None else 0,
        duration_ns=read.duration_ns if read is not None else 0,
        at_ns=now_ns,
    )
