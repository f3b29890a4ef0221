"""The target's side of a moving sequence in a modelled engine: room set aside, what was read into it, the arrival."""

from __future__ import annotations

from millrace.actor.engine import KvDenied, KvRoomReserved, ReserveInEngine, denied
from millrace.contracts.kv import CopierKind, KvEndpoint, KvHandover, KvRefusal
from millrace.contracts.status import SequenceState
from millrace.enginemodel.scheduler import Scheduler
from millrace.enginemodel.stream import ModelledSequence
from millrace.kvcache.chain import extend_chain


class ModelledReservation:
    """Room for one sequence to come.

    Attributes:
        endpoint: Of the source.
        matched: Positions below this came out of the prefix index.
        replica: It is a KV replica: it grows, and may be given up at any time.
        good: Positions whose KV is there: matched, or read without an error that was seen.
    """

    __slots__ = ("blocks", "endpoint", "good", "matched", "migration", "replica", "sequence")

    def __init__(self, command: ReserveInEngine, hits: list[int], fresh: list[int]) -> None:
        self.migration = command.migration
        self.sequence = command.sequence
        self.endpoint = command.endpoint
        self.blocks = hits + fresh
        self.matched = len(hits)
        self.replica = command.replica
        self.good = set(range(len(hits)))

    def known_tokens(self, computed: int, block_size: int) -> int:
        """Tokens, at most ``computed``, whose KV is there without a gap."""
        position = 0
        while position * block_size < computed and position in self.good:
            position += 1
        return min(computed, position * block_size)


class Arrivals:
    """Room of one engine set aside for sequences to come, by migration. Knows no time: whoever asked ends it."""

    def __init__(self, scheduler: Scheduler, endpoint: KvEndpoint | None) -> None:
        self._scheduler = scheduler
        self._endpoint = endpoint
        self._reservations: dict[str, ModelledReservation] = {}

    def __len__(self) -> int:
        self._forget_lost()
        return len(self._reservations)

    def _forget_lost(self) -> None:
        kept = self._scheduler.replicas
        for name in [name for name, each in self._reservations.items() if each.replica and name not in kept]:
            del self._reservations[name]

    @property
    def yielding(self) -> int:
        """Blocks of replicas, which are free as soon as anything else needs them; not those that a prefix shares."""
        replicas = self._scheduler.replicas
        return sum(len(blocks) - self._reservations[name].matched for name, blocks in replicas.items())

    @property
    def poisoned(self) -> list[str]:
        """Sequences that decoded from something else than their own KV, for checkers (contents.py)."""
        contents = self._scheduler.contents
        return [] if contents is None else contents.poisoned

    def get(self, migration: str) -> ModelledReservation | None:
        self._forget_lost()
        return self._reservations.get(migration)

    def reserve(self, command: ReserveInEngine) -> KvRoomReserved | KvDenied:
        """Takes idle blocks, those of the sequence's prefix among them, and a place in the batch."""
        if (refusal := self._refusal(command)) is not None:
            return refusal
        pool = self._scheduler.pool
        hits = self._hits(command.token_ids)
        fresh = max(0, command.blocks - len(hits))
        if not command.replica and self._scheduler.places() < 1:
            return denied(command, KvRefusal.NO_BLOCKS, "the batch has no place left")
        if not self._has_room(command, fresh + pool.unreferenced(hits)):
            return denied(command, KvRefusal.NO_BLOCKS, f"{fresh} blocks wanted, {pool.free} free")
        pool.share(hits)
        reservation = ModelledReservation(command, hits, pool.take(fresh))
        self._reservations[command.migration] = reservation
        held = self._scheduler.replicas if command.replica else self._scheduler.aside
        held[command.migration] = reservation.blocks
        return KvRoomReserved(migration=command.migration, matched_blocks=len(hits), copier=CopierKind.MODELLED)

    def _has_room(self, command: ReserveInEngine, blocks: int) -> bool:
        """Whether so many blocks are free; replicas give way, but not to each other."""
        if command.replica:
            return blocks <= self._scheduler.pool.free
        return self._scheduler.make_room(blocks)

    def grow(self, reservation: ModelledReservation, blocks: int) -> bool:
        """Lets a replica have so many blocks in all. Returns False where they are not free."""
        pool, held = self._scheduler.pool, reservation.blocks
        missing = blocks - len(held) if reservation.replica else 0
        if missing > pool.free:
            return False
        if missing > 0:
            held += pool.take(missing)
        return True

    def _refusal(self, command: ReserveInEngine) -> KvDenied | None:
        mine, theirs = self._endpoint, command.endpoint
        if mine is None:
            return denied(command, KvRefusal.UNABLE, "this engine moves nothing")
        if self.get(command.migration) is not None:
            return denied(command, KvRefusal.INVALID, "reserved already")
        if mine.fingerprint != theirs.fingerprint or mine.block_tokens != theirs.block_tokens:
            return denied(command, KvRefusal.INCOMPATIBLE, f"{theirs.fingerprint} here, {mine.fingerprint} there")
        if CopierKind.MODELLED not in theirs.copiers:
            return denied(command, KvRefusal.INCOMPATIBLE, "no copier in common")
        return None

    def _hits(self, token_ids: list[int]) -> list[int]:
        parameters = self._scheduler.parameters
        if not parameters.prefix_caching or not token_ids:
            return []
        hashes: list[int] = []
        extend_chain(hashes, token_ids, parameters.block_size)
        return self._scheduler.pool.find(hashes, (len(token_ids) - 1) // parameters.block_size)

    def free(self, migration: str) -> bool:
        """Ends a reservation; its blocks are free at once. Returns whether there was one."""
        reservation = self._take(migration)
        if reservation is None:
            return False
        self._scheduler.pool.release(reservation.blocks)
        return True

    def _take(self, migration: str) -> ModelledReservation | None:
        """Ends a reservation; its blocks are the caller's. None where there is none."""
        self._forget_lost()
        reservation = self._reservations.pop(migration, None)
        if reservation is not None:
            del (self._scheduler.replicas if reservation.replica else self._scheduler.aside)[migration]
        return reservation

    def adopt(self, sequence: ModelledSequence, handover: KvHandover) -> int:
        """Gives a sequence what was read for it; what is missing is computed like a prompt. The reservation ends.

        With no block that is good, or no room for all of it, it waits like any other and is computed anew.

        Returns: tokens whose KV it brought.
        """
        reservation = self._take(handover.migration)
        assert reservation is not None, "nothing is reserved"
        block_size, pool = self._scheduler.parameters.block_size, self._scheduler.pool
        kept = reservation.blocks[: -(-sequence.total // block_size)]
        pool.release(reservation.blocks[len(kept) :])
        computed = reservation.known_tokens(min(handover.computed_tokens, sequence.total - 1), block_size)
        missing = -(-sequence.total // block_size) - len(kept)
        beside = sum(group.blocks_in_step(computed, sequence.total) for group in self._scheduler.beside)
        sequence.state = SequenceState.WAITING
        if not computed or not self._scheduler.make_room(missing + beside):
            pool.release(kept)
            self._scheduler.add(sequence)
            return 0
        kept += pool.take(missing)
        self._scheduler.adopt(sequence, kept, computed=computed, named=min(reservation.matched, len(kept)))
        return computed

    def check_invariants(self) -> None:
        self._forget_lost()
        mine = {migration: reservation.blocks for migration, reservation in self._reservations.items()}
        assert mine == self._scheduler.aside | self._scheduler.replicas, "set aside, but not reserved"
        for reservation in self._reservations.values():
            assert reservation.good <= set(range(len(reservation.blocks)))
