"""Moves sequences in and out of a modelled engine as time passes: the driver's half of ``Engine.move``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from millrace.actor.engine import (
    EndLeaseInEngine,
    EngineEvent,
    EngineSequence,
    EngineStepped,
    FreezeInEngine,
    KvBlocksRead,
    KvCommand,
    KvDenied,
    LeaseInEngine,
    PullIntoEngine,
    ReserveInEngine,
    SequenceStopped,
    UnreserveInEngine,
    denied,
)
from millrace.contracts.kv import CopierKind, KvRefusal, read_until_ns
from millrace.enginemodel.arrivals import ModelledReservation
from millrace.enginemodel.contents import NOTHING
from millrace.enginemodel.engine import ModelledEngine
from millrace.enginemodel.network import Clock, KvNetwork, KvRead, KvReadEnded


@dataclass(slots=True, eq=False)
class _Reading:
    """A read under way.

    Attributes:
        over: Called once with how it ended, the deadline included.
    """

    read: KvRead
    positions: range
    began_ns: int
    over: Callable[[KvReadEnded], None]
    cancel: Callable[[], None] = field(default=lambda: None)


class Transfers:
    """Carries out what concerns leases and reservations of one engine.

    The driver ends a run of steps before each call, and begins to step again where there is work after it.

    Attributes:
        network: Carries other engines' KV here; None for an engine that moves nothing.
    """

    def __init__(self, engine: ModelledEngine, clock: Clock, say: Callable[[EngineEvent], None]) -> None:
        self.network: KvNetwork | None = None
        self._engine = engine
        self._clock = clock
        self._say = say
        self._reading: dict[str, _Reading] = {}
        self._sources: dict[str, EngineSequence] = {}  # by migration, while their last blocks are read

    def carry_out(self, command: KvCommand) -> list[EngineEvent]:
        """Returns what to answer at once; the rest comes through ``say``."""
        engine = self._engine
        if engine.moves.endpoint is None or self.network is None:
            return _unable(command)
        match command:
            case LeaseInEngine(sequence=sequence):
                return [engine.moves.leases.lease(command, engine.find(sequence))]
            case FreezeInEngine():
                answer = engine.moves.leases.freeze(command, self._clock.now_ns())
                return [] if answer is None else self.with_unreported(answer)
            case EndLeaseInEngine(migration=migration, moved=moved):
                engine.end_lease(migration, moved=moved)
            case ReserveInEngine():
                return [engine.moves.arrivals.reserve(command)]
            case PullIntoEngine():
                return self._pull(command)
            case UnreserveInEngine(migration=migration):
                # A sequence that has come already owns the room: only its own end frees it.
                if migration not in self._sources:
                    self._stop_reading(migration)
                    engine.moves.arrivals.free(migration)
        return []

    def settled(self, now_ns: int) -> list[EngineEvent]:
        """After a step: answers to freezes that waited for it."""
        answers = self._engine.moves.leases.settled(now_ns)
        return [event for answer in answers for event in self.with_unreported(answer)]

    def with_unreported(self, answer: SequenceStopped | KvDenied) -> list[EngineEvent]:
        """An answer after every output of its sequence."""
        unreported = self._engine.unreported(answer.sequence) if isinstance(answer, SequenceStopped) else []
        if not unreported:
            return [answer]
        return [EngineStepped(step=self._engine.steps, at_ns=self._clock.now_ns(), outputs=unreported), answer]

    # Pulls

    def _pull(self, command: PullIntoEngine) -> list[EngineEvent]:
        migration, count = command.migration, len(command.blocks)
        reservation = self._engine.moves.arrivals.get(migration)
        if reservation is None or migration in self._sources:
            return [denied(command, KvRefusal.INVALID, "nothing is reserved")]
        if not self._engine.moves.arrivals.grow(reservation, command.from_block + count):
            return [denied(command, KvRefusal.NO_BLOCKS, "no block is free to grow")]
        if (
            not reservation.matched <= command.from_block <= len(reservation.blocks) - count
            or migration in self._reading
        ):
            detail = f"positions {command.from_block} to {command.from_block + count} of {len(reservation.blocks)}"
            return [denied(command, KvRefusal.INVALID, detail)]
        read = self._read_of(reservation, command.from_block, command.blocks, command.checksums, lease=command.lease)
        self._begin(read, command.from_block, command.until_ns, partial(self._pulled, command))
        return []

    def _read_of(
        self,
        reservation: ModelledReservation,
        first: int,
        rows: list[list[int]],
        checksums: list[list[int]],
        *,
        lease: str = "",
    ) -> KvRead:
        blocks = [block for (block,) in rows]
        return KvRead(
            migration=reservation.migration,
            endpoint=reservation.endpoint,
            blocks=blocks,
            into=reservation.blocks[first : first + len(blocks)],
            checksums=checksums,
            lease=lease,
        )

    def _pulled(self, command: PullIntoEngine, ended: KvReadEnded) -> None:
        reading = self._reading.pop(command.migration)
        answer: EngineEvent
        if ended.refusal is not None:
            answer = denied(command, ended.refusal, ended.detail)
        else:
            self._filled(reading, ended)
            answer = KvBlocksRead(
                migration=command.migration,
                from_block=command.from_block,
                blocks=len(command.blocks),
                bytes=reading.read.bytes,
                descriptors=reading.read.descriptors,
                duration_ns=self._clock.now_ns() - reading.began_ns,
                copier=CopierKind.MODELLED,
            )
        self._say(answer)

    def _filled(self, reading: _Reading, ended: KvReadEnded) -> None:
        reservation = self._engine.moves.arrivals.get(reading.read.migration)
        if reservation is not None:
            reservation.good.update(reading.positions)
            self._engine.moves.wrote(reading.read.into, ended.contents)

    # Arrivals

    def resume(self, source: EngineSequence) -> tuple[str | None, int]:
        """Takes a sequence that begins on a replica: nothing is left to read. Returns None, or why it is refused, and
        the tokens whose KV it has.
        """
        assert source.handover is not None
        self._stop_reading(source.handover.migration)
        refusal = self._engine.expect(source)
        if refusal is not None:
            self._engine.moves.arrivals.free(source.handover.migration)
            return refusal, 0
        return None, self._engine.moves.arrive(source)

    def receive(self, source: EngineSequence, arrived: Callable[[EngineSequence], None]) -> str | None:
        """Takes a sequence that has a reservation; ``arrived`` is called when it runs, its last blocks read or given
        up. Returns None, or why it is refused; then its reservation is free.
        """
        handover = source.handover
        assert handover is not None
        migration = handover.migration
        self._stop_reading(migration)
        refusal = self._engine.expect(source)
        reservation = self._engine.moves.arrivals.get(migration)
        assert reservation is not None, "the driver looked"
        if refusal is not None:
            self._engine.moves.arrivals.free(migration)
            return refusal
        self._sources[migration] = source
        last = max(handover.from_block, reservation.matched)
        blocks = handover.blocks[last - handover.from_block :][: max(0, len(reservation.blocks) - last)]
        checksums = [rank[last - handover.from_block :][: len(blocks)] for rank in handover.checksums]
        over = partial(self._last_read, source, arrived)
        if blocks:
            now_ns = self._clock.now_ns()
            until_ns = read_until_ns(now_ns, read_ms=handover.read_ms, until_ns=handover.until_ns)
            self._begin(self._read_of(reservation, last, blocks, checksums), last, until_ns, over)
        else:
            self._clock.at(0, partial(over, KvReadEnded()))
        return None

    def _last_read(self, source: EngineSequence, arrived: Callable[[EngineSequence], None], ended: KvReadEnded) -> None:
        assert source.handover is not None
        migration = source.handover.migration
        reading = self._reading.pop(migration, None)
        if self._sources.get(migration) is not source:
            return  # cancelled before anything was to be read
        del self._sources[migration]
        if reading is not None and ended.refusal is None:
            self._filled(reading, ended)
        arrived(source)

    def cancelled(self, sequences: list[str]) -> None:
        """Sequences leave the engine: those that were about to arrive give up their room."""
        for migration, source in list(self._sources.items()):
            if source.sequence in sequences:
                del self._sources[migration]
                self._stop_reading(migration)
                self._engine.moves.arrivals.free(migration)

    # Reads

    def _begin(self, read: KvRead, first: int, until_ns: int, over: Callable[[KvReadEnded], None]) -> None:
        assert self.network is not None
        reservation = self._engine.moves.arrivals.get(read.migration)
        assert reservation is not None
        reading = _Reading(read, range(first, first + len(read.blocks)), self._clock.now_ns(), over)
        reservation.good.difference_update(reading.positions)
        self._engine.moves.wrote(read.into, [NOTHING] * len(read.into))
        self._reading[read.migration] = reading
        reading.cancel = self.network.begin(read, partial(self._ended, reading, until_ns))
        self._clock.at(max(until_ns + 1, reading.began_ns + 1), partial(self._late, reading))

    def _ended(self, reading: _Reading, until_ns: int, ended: KvReadEnded) -> None:
        if self._reading.get(reading.read.migration) is reading:
            reading.over(_LATE if self._clock.now_ns() > until_ns else ended)

    def _late(self, reading: _Reading) -> None:
        if self._reading.get(reading.read.migration) is reading:
            reading.cancel()
            reading.over(_LATE)

    def _stop_reading(self, migration: str) -> None:
        reading = self._reading.pop(migration, None)
        if reading is not None:
            reading.cancel()


_LATE = KvReadEnded(refusal=KvRefusal.LEASE_LOST, detail="the read ended after the lease")


def _unable(command: KvCommand) -> list[EngineEvent]:
    if isinstance(command, EndLeaseInEngine | UnreserveInEngine):
        return []
    return [denied(command, KvRefusal.UNABLE, "this engine moves nothing")]
