"""The source's side of a moving sequence in a modelled engine: what is leased, and who stands still.

A lease ends by itself with its sequence's stay in the batch: preempted or ended, its blocks are the pool's again, and
the next question about the lease is denied LEASE_LOST. So blocks are pinned by their sequence and by nothing else, and
no lease can leak one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from millrace.actor.engine import FreezeInEngine, KvDenied, KvLeaseTaken, LeaseInEngine, SequenceStopped
from millrace.contracts.kv import KvRefusal
from millrace.contracts.status import SequenceState
from millrace.enginemodel.scheduler import Scheduler
from millrace.enginemodel.sequence import ScheduledSequence

#: Migrations whose blocks are remembered after their lease, for whoever judges what was read: more than any link
#: has under way.
LOG_MAX = 256

#: (tokens whose KV is there, whether a step under way computes more of it).
Progress = Callable[[ScheduledSequence], tuple[int, bool]]


class ModelledLease:
    """One leased sequence.

    Attributes:
        preemptions: Of the sequence when the lease was taken; more means that its blocks are not what they were.
        freeze_from: Position that a freeze asked for, while it waits for the step under way to end.
    """

    __slots__ = ("freeze_from", "migration", "preemptions", "sequence")

    def __init__(self, migration: str, sequence: ScheduledSequence) -> None:
        self.migration = migration
        self.sequence = sequence
        self.preemptions = sequence.preemptions
        self.freeze_from: int | None = None

    @property
    def holds(self) -> bool:
        """Whether the leased blocks are still the sequence's."""
        running = self.sequence.state is SequenceState.RUNNING
        return running and self.sequence.preemptions == self.preemptions


class ModelledLeases:
    """Leases of one engine, by migration. Knows no time: whoever asked for a lease ends it.

    Attributes:
        log: Migration -> block -> generation that the block had when it was leased; for checkers.
    """

    def __init__(self, scheduler: Scheduler, progress: Progress, *, salt: int = 0) -> None:
        """Args: salt: tells this engine's contents from others'."""
        self._scheduler = scheduler
        self._progress = progress
        self._salt = salt
        self.verify = True
        self._leases: dict[str, ModelledLease] = {}
        self.log: OrderedDict[str, dict[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._leases)

    def lease(self, command: LeaseInEngine, sequence: ScheduledSequence | None) -> KvLeaseTaken | KvDenied:
        """Takes or renews a lease of a sequence, None where it is not here."""
        migration = command.migration
        lease = self._leases.get(migration)
        refusal = self._refusal(lease, sequence)
        if refusal is not None or sequence is None:
            return KvDenied(migration=migration, reason=refusal or KvRefusal.UNKNOWN_SEQUENCE)
        if lease is None:
            self._leases[migration] = ModelledLease(migration, sequence)
            self.log[migration] = {}
        computed, _ = self._progress(sequence)
        blocks = sequence.blocks[: computed // self._scheduler.parameters.block_size][command.from_block :]
        self._note(migration, blocks)
        return KvLeaseTaken(
            migration=migration,
            sequence=sequence.sequence,
            from_block=command.from_block,
            blocks=rows_of(blocks),
            prompt_tokens=sequence.prompt_tokens,
            output_tokens=sequence.total - sequence.prompt_tokens,
            computed_tokens=computed,
            checksums=self._checksums(blocks),
        )

    def _refusal(self, lease: ModelledLease | None, sequence: ScheduledSequence | None) -> KvRefusal | None:
        if lease is not None:
            return None if lease.holds and lease.sequence is sequence else self._lost(lease)
        if sequence is None or sequence.state is None:
            return KvRefusal.UNKNOWN_SEQUENCE
        computed, _ = self._progress(sequence)
        decodes = computed + 1 >= sequence.total > sequence.prompt_tokens
        if sequence.state is not SequenceState.RUNNING or not decodes:
            return KvRefusal.NOT_RUNNING
        return None

    def _lost(self, lease: ModelledLease) -> KvRefusal:
        del self._leases[lease.migration]
        return KvRefusal.LEASE_LOST

    def freeze(self, command: FreezeInEngine, now_ns: int) -> SequenceStopped | KvDenied | None:
        """Stops a leased sequence. None: it stands still after the step under way, and ``settled`` tells."""
        lease = self._leases.get(command.migration)
        if lease is None:
            return KvDenied(migration=command.migration, reason=KvRefusal.LEASE_LOST)
        if not lease.holds:
            return KvDenied(migration=command.migration, reason=self._lost(lease))
        if lease.sequence not in self._scheduler.frozen:
            self._scheduler.freeze(lease.sequence)
        lease.freeze_from = command.from_block
        return self._stopped(lease, now_ns)

    def settled(self, now_ns: int) -> list[SequenceStopped | KvDenied]:
        """After a step: those that stand still since, or ended with it."""
        if not self._leases:
            return []
        waiting = [lease for lease in self._leases.values() if lease.freeze_from is not None]
        answers = [self._stopped(lease, now_ns) for lease in waiting]
        return [answer for answer in answers if answer is not None]

    def _stopped(self, lease: ModelledLease, now_ns: int) -> SequenceStopped | KvDenied | None:
        sequence, from_block = lease.sequence, lease.freeze_from
        assert from_block is not None
        if not lease.holds:
            return KvDenied(migration=lease.migration, reason=self._lost(lease))
        computed, under_way = self._progress(sequence)
        if under_way:
            return None
        lease.freeze_from = None
        blocks = sequence.blocks[: -(-computed // self._scheduler.parameters.block_size)][from_block:]
        self._note(lease.migration, blocks)
        return SequenceStopped(
            migration=lease.migration,
            sequence=sequence.sequence,
            from_block=from_block,
            blocks=rows_of(blocks),
            output_token_ids=sequence.output_token_ids(),
            computed_tokens=computed,
            frozen_ns=now_ns,
            checksums=self._checksums(blocks),
        )

    def end(self, migration: str, *, moved: bool) -> ScheduledSequence | None:
        """Ends a lease. A frozen sequence decodes on, unless it has moved.

        Returns: the sequence that has moved, for the engine to let go.
        """
        lease = self._leases.pop(migration, None)
        if lease is None or not lease.holds:
            return None
        if moved:
            return lease.sequence
        if lease.sequence in self._scheduler.frozen:
            self._scheduler.thaw(lease.sequence)
        return None

    # What was leased

    def holder(self, sequence: ScheduledSequence) -> str:
        """Migration that has leased a sequence; empty for none."""
        return next((name for name, lease in self._leases.items() if lease.sequence is sequence), "")

    def leased_blocks(self) -> set[int]:
        """Blocks under a lease that holds now: each belongs to its sequence."""
        return {block for lease in self._leases.values() if lease.holds for block in self.log[lease.migration]}

    def checksum(self, block: int) -> int:
        """Stands for the checksum of a block's bytes: differs with the engine, the block and what is in it."""
        return _checksum(self._salt, block, self._scheduler.pool.generation(block))

    def unchanged(self, migration: str, block: int) -> bool:
        """Whether a block that was leased under this name still has the same content."""
        leased = self.log.get(migration, {}).get(block)
        return leased is not None and leased == self._scheduler.pool.generation(block)

    def _checksums(self, blocks: list[int]) -> list[list[int]]:
        if not self.verify:
            return []
        generations = self._scheduler.pool.generations(blocks)
        return [[_checksum(self._salt, *each) for each in zip(blocks, generations, strict=True)]]

    def _note(self, migration: str, blocks: list[int]) -> None:
        noted = self.log.setdefault(migration, {})
        self.log.move_to_end(migration)
        noted.update(zip(blocks, self._scheduler.pool.generations(blocks), strict=True))
        if len(self.log) > LOG_MAX:
            self.log.popitem(last=False)

    def check_invariants(self) -> None:
        by_frozen = {lease.sequence for lease in self._leases.values() if lease.holds}
        assert set(self._scheduler.frozen) <= by_frozen, "a sequence stands still without a lease"
        for lease in self._leases.values():
            if lease.holds:
                assert set(self.log[lease.migration]) <= set(lease.sequence.blocks), "leased, but not held"


def rows_of(blocks: list[int]) -> list[list[int]]:
    """Blocks of the one group that a modelled engine has, as they travel."""
    return [[block] for block in blocks]


def _checksum(salt: int, block: int, generation: int) -> int:
    """32 bits. The factors are odd: two generations of one block differ, and two blocks of one generation."""
    return (salt ^ block * 0x9E37_79B1 ^ generation * 0x85EB_CA77) & 0xFFFF_FFFF
