"""Everything of a modelled engine that concerns moving: leases, room set aside, sequences that are about to arrive."""

from __future__ import annotations

import zlib

import msgspec

from millrace.actor.engine import EngineSequence
from millrace.contracts.kv import KvEndpoint
from millrace.contracts.status import SequenceState, SequenceStatus
from millrace.enginemodel.arrivals import Arrivals
from millrace.enginemodel.contents import KvContent, KvContents
from millrace.enginemodel.leases import ModelledLeases, Progress
from millrace.enginemodel.network import endpoint_key
from millrace.enginemodel.scheduler import Scheduler
from millrace.enginemodel.steps import statuses
from millrace.enginemodel.stream import ModelledSequence


class KvAccounting(msgspec.Struct, frozen=True, kw_only=True):
    """Number of an engine's blocks by use: ``total == free + held + reserved``. Leased ones are part of ``held``."""

    total: int
    free: int
    held: int
    reserved: int
    leased: int


class KvMoves:
    """Owns the leases and reservations of one engine.

    Attributes:
        endpoint: Where the engine's KV lies; None for one that moves nothing.
        leases: What other engines may read.
        arrivals: Room for sequences that come with their KV.
        coming: Sequences whose last blocks are being read; the scheduler does not know them yet.
    """

    def __init__(self, scheduler: Scheduler, progress: Progress, endpoint: KvEndpoint | None) -> None:
        self.endpoint = endpoint
        salt = zlib.crc32(endpoint_key(endpoint).encode()) if endpoint is not None else 0
        self.leases = ModelledLeases(scheduler, progress, salt=salt)
        self.arrivals = Arrivals(scheduler, endpoint)
        self.coming: dict[str, ModelledSequence] = {}
        self._scheduler = scheduler

    def keep_contents(self, contents: KvContents) -> None:
        """From now on, before the first sequence, tokens depend on what is in the blocks."""
        self._scheduler.contents = contents

    def look(self, blocks: list[int]) -> list[KvContent]:
        """Return the current contents of these blocks; empty where they are not kept. O(blocks without a name)."""
        contents, scheduler = self._scheduler.contents, self._scheduler
        if contents is None:
            return []
        return contents.look(blocks, (*scheduler.running, *scheduler.arrived, *scheduler.frozen))

    def wrote(self, blocks: list[int], contents: list[KvContent]) -> None:
        """A read brought this into these blocks."""
        if self._scheduler.contents is not None and contents:
            self._scheduler.contents.put(blocks, contents)

    def expect(self, sequence: ModelledSequence) -> None:
        """A sequence comes as soon as its last blocks are there."""
        sequence.state = None
        self.coming[sequence.sequence] = sequence

    def arrive(self, source: EngineSequence) -> int:
        """Gives an expected sequence the KV that was read for it. Returns tokens that need not be computed."""
        assert source.handover is not None
        return self.arrivals.adopt(self.coming.pop(source.sequence), source.handover)

    def standing(self) -> list[SequenceStatus]:
        """Return the statuses of sequences that have a place and are in no step: frozen ones and coming ones.

        Nothing of a coming sequence waits to be computed.
        """
        if not self._scheduler.frozen and not self.coming:
            return []
        running = SequenceState.RUNNING
        coming = [
            msgspec.structs.replace(status, state=running, computed_tokens=status.prompt_tokens + status.output_tokens)
            for status in statuses(self.coming.values())
        ]
        return statuses(self._scheduler.frozen) + coming

    def accounting(self) -> KvAccounting:
        """Return the number of blocks by use. O(blocks held)."""
        scheduler = self._scheduler
        here = (*scheduler.running, *scheduler.arrived, *scheduler.frozen)
        held = {block for sequence in here for block in sequence.blocks + sequence.beside}
        aside = {block for blocks in (*scheduler.aside.values(), *scheduler.replicas.values()) for block in blocks}
        return KvAccounting(
            total=scheduler.pool.blocks_total,
            free=scheduler.pool.free,
            held=len(held),
            reserved=len(aside - held),
            leased=len(self.leases.leased_blocks()),
        )

    def check_invariants(self) -> None:
        self.leases.check_invariants()
        self.arrivals.check_invariants()
        account = self.accounting()
        assert account.total == account.free + account.held + account.reserved, f"blocks are lost: {account}"
        assert all(sequence.state is None for sequence in self.coming.values()), "comes, but is there"
