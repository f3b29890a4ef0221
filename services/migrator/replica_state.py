"""State of one KV replica, and the messages of each step of its rounds. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from millrace.contracts.kv import KvEndpoint
from millrace.contracts.leases import EndLease, KvLeased, LeaseKv, PrepareMigration, PullKv
from millrace.contracts.migration import KvReplicated
from millrace.contracts.worker import Adapter

from services.migrator.config import MigratorLimits

_MS = 1_000_000


class ReplicaStep(StrEnum):
    """Step of a replica's round: what it waits for."""

    IDLE = "idle"  # for new full blocks
    LEASING = "leasing"
    RESERVING = "reserving"
    PACING = "pacing"  # for the bandwidth that it may take: a timer
    PULLING = "pulling"
    PROVING = "proving"
    KEEPING = "keeping"


@dataclass
class KvReplica:
    """One sequence's replica at another instance.

    Attributes:
        name: Of the reservation at the holder.
        holder, incarnation: Empty and 0 before one was chosen.
        ingress, adapter: Of the sequence.
        epoch: In which the source decodes it; -1 before the first lease.
        reserved: Whether the holder has made room.
        number: Of its last request: only that one's answer counts.
        round: Numbers its leases: each round has one of its own.
        known: Source blocks of the positions from ``from_block`` on, under the present lease, with their checksums.
        from_block: First position that the holder was not asked for.
        proven: Positions below this are right at the holder.
        told: Proven positions that the holder and ingress know of.
        lease_until_ns: By our clock from the moment of asking, so never later than the source's.
        due_ns: No round begins before.
        kept_ns: When the holder last answered.
        silences: Questions in a row that the holder did not answer.
    """

    name: str
    sequence: str
    source: str
    holder: str = ""
    incarnation: int = 0
    ingress: str = ""
    adapter: Adapter | None = None
    epoch: int = -1
    endpoint: KvEndpoint | None = None
    step: ReplicaStep = ReplicaStep.IDLE
    reserved: bool = False
    number: int = 0
    round: int = 0
    known: list[list[int]] = field(default_factory=list)
    checksums: list[list[int]] = field(default_factory=list)
    pulling: int = 0
    from_block: int = 0
    proven: int = 0
    told: int = 0
    lease_until_ns: int = 0
    asked_ns: int = 0
    due_ns: int = 0
    kept_ns: int = 0
    silences: int = 0

    @property
    def lease(self) -> str:
        """Name of the present round's lease."""
        return f"{self.name}.{self.round}"

    @property
    def block_tokens(self) -> int:
        """Tokens of a block; 0 before the first lease."""
        return self.endpoint.block_tokens if self.endpoint is not None else 0

    def lease_kv(self, lease_ms: int) -> LeaseKv:
        """Takes or renews the lease, and asks for the blocks that are not known."""
        return LeaseKv(
            migration=self.lease,
            sequence=self.sequence,
            epoch=self.epoch,
            from_block=self.from_block + len(self.known),
            lease_ms=lease_ms,
        )

    def leased(self, body: KvLeased) -> None:
        """Note blocks that were filled since the last answer."""
        if body.from_block != self.from_block + len(self.known):
            return
        ranks = len(body.checksums)
        self.known += body.blocks
        if len(self.checksums) != ranks:
            self.checksums = [[] for _ in range(ranks)]
        for told, sums in zip(self.checksums, body.checksums, strict=True):
            told += sums

    def forget_blocks(self) -> None:
        """The lease is over: what it showed may be in use for something else."""
        self.known, self.checksums, self.pulling = [], [], 0

    def skip(self, blocks: int) -> None:
        """The holder has these already."""
        del self.known[:blocks]
        for sums in self.checksums:
            del sums[:blocks]
        self.from_block += blocks

    def reserve(self, token_ids: list[int], limits: MigratorLimits) -> PrepareMigration:
        """Asks the holder for the room of the blocks that are full now."""
        assert self.endpoint is not None
        return PrepareMigration(
            migration=self.name,
            sequence=self.sequence,
            epoch=self.epoch,
            endpoint=self.endpoint,
            token_ids=token_ids[: len(self.known) * self.block_tokens],
            blocks=len(self.known),
            reserve_ms=limits.reserve_ms,
            replica=True,
            adapter=self.adapter,
        )

    def pull(self, blocks_max: int, *, now_ns: int, margin_ms: int) -> PullKv | None:
        """Asks the holder to read the next blocks. None where the lease is about to end."""
        ends_ns = self.lease_until_ns - margin_ms * _MS
        read_ms = (ends_ns - now_ns) // _MS
        if read_ms <= 0:
            return None
        self.pulling = min(blocks_max, len(self.known))
        return PullKv(
            migration=self.name,
            lease=self.lease,
            from_block=self.from_block,
            blocks=self.known[: self.pulling],
            read_ms=read_ms,
            checksums=[sums[: self.pulling] for sums in self.checksums],
            proven=self.proven,
        )

    def keep(self) -> PullKv:
        """Tells the holder what is proven, and has it hold the replica for longer."""
        return PullKv(migration=self.name, from_block=self.proven, blocks=[], read_ms=0, proven=self.proven)

    def end_lease(self) -> EndLease:
        """Ends the round's lease; the sequence goes on where it is."""
        return EndLease(migration=self.lease, sequence=self.sequence, epoch=self.epoch, moved=False)

    def replicated(self, tokens: int) -> KvReplicated:
        """The message to its ingress; no tokens where the replica is gone."""
        return KvReplicated(
            sequence=self.sequence,
            epoch=self.epoch,
            replica=self.name,
            instance=self.holder,
            incarnation=self.incarnation,
            tokens=tokens,
        )
