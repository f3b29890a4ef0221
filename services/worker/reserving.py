"""The worker's half of a reservation: room for a sequence to come, and what is read into it.

question          change                             to the engine
MoveBid           its broker takes an award
PrepareMigration  reserved for a time                ReserveInEngine, then PullIntoEngine for the first blocks
PullKv            renewed; blocks are read           PullIntoEngine
UnreserveKv       over                               UnreserveInEngine
SubmitSequence    over: the sequence has it          AddToEngine (intake.py)
(deadline)        over                               UnreserveInEngine

A KV replica is a reservation that grows with each pull and waits for a continuation, which names it. It is refused
beyond a share of the blocks; the engine gives it up for whatever else needs them. It ends as well when ingress cancels
its sequence: that has ended, or goes on elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from millrace.actor.effects import CancelTimer, Effect, Log, StartTimer
from millrace.actor.engine import (
    KvBlocksRead,
    KvDenied,
    KvRoomReserved,
    PullIntoEngine,
    ReserveInEngine,
    UnreserveInEngine,
)
from millrace.contracts.broker import MoveBid
from millrace.contracts.kv import KvHandover, KvRefusal
from millrace.contracts.leases import KvPulled, KvRefused, MigrationPrepared, PrepareMigration, PullKv, UnreserveKv
from millrace.contracts.status import EngineDescription
from millrace.contracts.worker import SubmitSequence

from services.worker.config import MigrationConfig
from services.worker.context import WorkerContext, answer
from services.worker.questions import Ended, PendingQuestion, Questions, is_repeat, refused

_MS = 1_000_000
TIMER = "reserve/"
#: Bids that are remembered, and how long one may hold at most.
BIDS_MAX, BID_MS_MAX = 256, 10_000


@dataclass(slots=True, kw_only=True)
class SequenceReservation:
    """Room for one sequence.

    Attributes:
        blocks: Positions that it has room for; those of a replica grow.
        proven: As in PullKv.
        room: What the engine reserved; None before.
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


class Reserving:
    """Owns the reservations of one instance."""

    def __init__(self, ctx: WorkerContext, info: EngineDescription, config: MigrationConfig, *, live_max: int) -> None:
        self._ctx = ctx
        self._info = info
        self._config = config
        self._live_max = live_max
        self._reservations: dict[str, SequenceReservation] = {}
        self._bids: dict[str, tuple[str, int]] = {}  # by ask: (sequence, until)
        self._ended = Ended()

    def __len__(self) -> int:
        return sum(not each.replica for each in self._reservations.values())

    @property
    def replicas(self) -> list[SequenceReservation]:
        """KV replicas; some that the engine has given up since may be among them."""
        return [each for each in self._reservations.values() if each.replica]

    # Bids

    def on_bid(self, body: MoveBid, now_ns: int) -> None:
        """Its broker has bid for a sequence: an award that names the ask is taken until the bid's deadline."""
        if body.refusal is None:
            self._bids.pop(body.ask, None)
            self._bids[body.ask] = (body.sequence, now_ns + min(max(0, body.valid_ms), BID_MS_MAX) * _MS)
            if len(self._bids) > BIDS_MAX:
                del self._bids[next(iter(self._bids))]

    def _is_bid(self, body: PrepareMigration, now_ns: int) -> bool:
        sequence, until_ns = self._bids.get(body.award, ("", 0))
        return sequence == body.sequence and now_ns < until_ns

    # Questions

    def prepare(self, body: PrepareMigration, reply_to: str, now_ns: int) -> list[Effect]:
        """Asks the engine for room, then to read the first blocks; asked again, the same answer."""
        reservation = self._reservations.get(body.migration)
        if reservation is None:
            no = self._refusal(body, now_ns)
            if no is not None:
                return self._ctx.refuse_kv(body.sequence, reply_to, no)
            reserve_ms = min(max(0, body.reserve_ms), self._config.reserve_ms_max)
            reserve_ns = (self._config.replicas.hold_ms if body.replica else reserve_ms) * _MS
            reservation = SequenceReservation(
                asked=body, reserve_ns=reserve_ns, until_ns=now_ns + reserve_ns, blocks=body.blocks
            )
            self._reservations[body.migration] = reservation
        elif (reservation.sequence, reservation.epoch) != (body.sequence, body.epoch):
            return self._ctx.refuse_kv(
                body.sequence, reply_to, refused(body.migration, KvRefusal.INVALID, "another sequence")
            )
        elif reservation.granted is not None:
            return [self._renew(reservation, now_ns), *answer(reply_to, body.sequence, reservation.granted)]
        return [self._renew(reservation, now_ns), *self._ask(reservation, body, reply_to, now_ns)]

    def _refusal(self, body: PrepareMigration, now_ns: int) -> KvRefused | None:
        """Reason to refuse a reservation without asking the engine."""
        migration, ledger = body.migration, self._ctx.ledger
        fence = ledger.fenced(body.sequence)
        if self._info.kv is None or not self._config.enabled:
            return refused(migration, KvRefusal.UNABLE, self._info.kv_refusal or "migration is off")
        if migration in self._ended:
            return refused(migration, KvRefusal.CANCELLED, "this migration is over here")
        if body.award and not self._is_bid(body, now_ns):
            return refused(migration, KvRefusal.NO_BID, "no such bid is open")
        if self._ctx.reporter.draining:
            return refused(migration, KvRefusal.TARGET_REFUSED, "this worker takes no new work")
        if fence is not None and body.epoch <= fence:
            return refused(migration, KvRefusal.TARGET_REFUSED, f"epoch {fence} is known here")
        if ledger.live >= self._live_max:
            return refused(migration, KvRefusal.TARGET_REFUSED, f"{ledger.live} sequences, at most that many")
        if body.replica and (no := self._replica_refusal(body)) is not None:
            return no
        if not body.replica and len(self) >= self._config.reservations_max:
            return refused(migration, KvRefusal.TOO_MANY, f"{len(self)} reservations")
        if not 0 < len(body.token_ids) < self._info.max_model_len:
            return refused(migration, KvRefusal.INVALID, f"{len(body.token_ids)} tokens")
        if body.blocks * self._info.kv.block_tokens < len(body.token_ids):
            return refused(migration, KvRefusal.INVALID, f"{body.blocks} blocks for {len(body.token_ids)} tokens")
        if any(len(rank) != len(body.pull) for rank in body.checksums):
            return refused(migration, KvRefusal.INVALID, "blocks and checksums do not fit together")
        return None

    def _replica_refusal(self, body: PrepareMigration) -> KvRefused | None:
        bounds, held = self._config.replicas, self.replicas
        if not bounds.memory_share:
            return refused(body.migration, KvRefusal.UNABLE, "this instance holds no replicas")
        if len(held) >= bounds.count_max:
            return refused(body.migration, KvRefusal.TOO_MANY, f"{len(held)} replicas")
        if not self._has_share(body.blocks):
            return refused(body.migration, KvRefusal.NO_BLOCKS, "replicas have their share of the blocks")
        return None

    def _has_share(self, more: int) -> bool:
        """Whether replicas may have so many blocks more."""
        held = sum(each.blocks for each in self.replicas)
        return held + more <= self._config.replicas.memory_share * self._info.blocks_total

    def pull(self, body: PullKv, reply_to: str, now_ns: int) -> list[Effect]:
        """Reads blocks; asked again, the same answer."""
        reservation = self._reservations.get(body.migration)
        if reservation is None:
            no = refused(body.migration, KvRefusal.INVALID, "nothing is reserved for this migration")
            return self._ctx.refuse_kv("", reply_to, no)
        if body.from_block < 0 or any(len(rank) != len(body.blocks) for rank in body.checksums):
            no = refused(body.migration, KvRefusal.INVALID, "blocks and checksums do not fit together")
            return self._ctx.refuse_kv(reservation.sequence, reply_to, no)
        reservation.proven = max(reservation.proven, body.proven)
        more = body.from_block + len(body.blocks) - reservation.blocks
        if reservation.replica and more > 0:
            if not self._has_share(more):
                no = refused(body.migration, KvRefusal.NO_BLOCKS, "replicas have their share of the blocks")
                return [self._renew(reservation, now_ns), *self._ctx.refuse_kv(reservation.sequence, reply_to, no)]
            reservation.blocks += more
        if not body.blocks and reservation.granted is not None:
            nothing = nothing_pulled(body, reservation.granted, now_ns)
            return [self._renew(reservation, now_ns), *answer(reply_to, reservation.sequence, nothing)]
        if reservation.last is not None and is_repeat(reservation.last[0], body):
            return [self._renew(reservation, now_ns), *answer(reply_to, reservation.sequence, reservation.last[1])]
        return [self._renew(reservation, now_ns), *self._ask(reservation, body, reply_to, now_ns)]

    def unreserve(self, body: UnreserveKv) -> list[Effect]:
        """Frees a reservation, and what comes late for this migration finds it over."""
        reservation = self._reservations.get(body.migration)
        if reservation is None:
            self._ended.put(body.migration)
            return []
        return self._close(reservation, KvRefusal.CANCELLED)

    def claim(self, body: SubmitSequence) -> tuple[KvHandover | None, list[Effect]]:
        """The sequence of a reservation has come: its handover goes to the engine, which owns the room from now on.
        None where there is no room of that name for this sequence and epoch: its KV has to be computed.
        """
        handover = body.handover
        reservation = self._reservations.get(handover.migration) if handover is not None else None
        if reservation is None or reservation.granted is None or reservation.replica:
            return None, []
        if (reservation.sequence, reservation.epoch) != (body.sequence, body.epoch):
            return None, []
        return handover, self._claimed(reservation)

    def claim_replica(self, body: SubmitSequence) -> tuple[KvHandover | None, list[Effect]]:
        """The sequence of a replica continues here: a handover of what is proven, with nothing left to read. None where
        there is no such replica, or nothing of use in it.
        """
        reservation = self._reservations.get(body.replica)
        if reservation is None or not reservation.replica or reservation.sequence != body.sequence:
            return None, []
        handover = handover_of(reservation, body)
        if handover is None:
            return None, self._close(reservation, KvRefusal.CANCELLED)
        return handover, self._claimed(reservation)

    def _claimed(self, reservation: SequenceReservation) -> list[Effect]:
        self._forget(reservation)
        timer = CancelTimer(name=TIMER + reservation.migration)
        return [timer, *self._refuse_rest(reservation, KvRefusal.CANCELLED)]

    def drop_replicas(self, sequence: str, epoch: int) -> list[Effect]:
        """A sequence has ended, or goes on elsewhere: its replicas up to an epoch are of no use."""
        group = [each for each in self.replicas if each.sequence == sequence and each.epoch <= epoch]
        return [effect for each in group for effect in self._close(each, KvRefusal.CANCELLED)]

    def _ask(
        self, reservation: SequenceReservation, body: PrepareMigration | PullKv, reply_to: str, now_ns: int
    ) -> list[Effect]:
        return self._next(reservation) if reservation.questions.put(body, reply_to, now_ns) else []

    def _next(self, reservation: SequenceReservation) -> list[Effect]:
        match reservation.questions.first:
            case PendingQuestion(body=PrepareMigration() as body):
                fields = {name: getattr(body, name) for name in ReserveInEngine.__struct_fields__}
                return [ReserveInEngine(**fields)]
            case PendingQuestion(body=PullKv() as body) as asked:
                return [self._pull(body, asked)]
            case _:
                return []

    def _pull(self, body: PullKv, asked: PendingQuestion) -> Effect:
        return PullIntoEngine(
            migration=body.migration,
            from_block=body.from_block,
            blocks=body.blocks,
            checksums=body.checksums,
            until_ns=self._read_until_ns(asked),
            lease=body.lease,
        )

    def _read_until_ns(self, asked: PendingQuestion) -> int:
        assert isinstance(asked.body, PrepareMigration | PullKv)
        return asked.at_ns + min(max(0, asked.body.read_ms), self._config.lease_ms_max) * _MS

    # The engine's answers

    def reserved(self, body: KvRoomReserved, now_ns: int) -> list[Effect]:
        """There is room: the first blocks are read, if there are any."""
        reservation = self._reservations.get(body.migration)
        if reservation is None or not reservation.questions.asks(PrepareMigration) or reservation.room is not None:
            return []
        reservation.room, reservation.proven = body, body.matched_blocks
        first, asked = first_blocks(reservation.asked, body), reservation.questions.first
        assert asked is not None
        return [self._pull(first, asked)] if first is not None else self._grant(reservation, None, now_ns)

    def _grant(self, reservation: SequenceReservation, read: KvBlocksRead | None, now_ns: int) -> list[Effect]:
        assert reservation.room is not None
        reservation.granted = prepared(reservation.room, read, now_ns)
        told = reservation.questions.answer(reservation.sequence, reservation.granted)
        return [self._renew(reservation, now_ns), *told, *self._next(reservation)]

    def read(self, body: KvBlocksRead, now_ns: int) -> list[Effect]:
        """Blocks are here."""
        reservation = self._reservations.get(body.migration)
        first = reservation.questions.first if reservation is not None else None
        if reservation is None or first is None or not isinstance(first.body, PrepareMigration | PullKv):
            return []
        if isinstance(first.body, PrepareMigration) and reservation.room is None:
            return []
        if isinstance(first.body, PrepareMigration):
            return self._grant(reservation, body, now_ns)
        pulled = KvPulled(**{name: getattr(body, name) for name in KvBlocksRead.__struct_fields__}, at_ns=now_ns)
        reservation.last = (first.body, pulled)
        told = reservation.questions.answer(reservation.sequence, pulled)
        return [self._renew(reservation, now_ns), *told, *self._next(reservation)]

    def denied(self, body: KvDenied) -> list[Effect]:
        """The engine's no. A room that was not given is nobody's; one that was stays."""
        reservation = self._reservations.get(body.migration)
        asked = reservation.questions.first if reservation is not None else None
        if reservation is None or asked is None:
            return []
        figures = self._ctx.figures
        figures.kv_refused[body.reason] += 1
        told = reservation.questions.answer(reservation.sequence, refused(body.migration, body.reason, body.detail))
        if reservation.replica and body.reason is KvRefusal.INVALID:
            figures.replicas_yielded += 1  # the engine knows it no more
            return told + self._close(reservation, KvRefusal.CANCELLED)
        if isinstance(asked.body, PullKv) and body.reason is KvRefusal.NO_BLOCKS:
            reservation.blocks = min(reservation.blocks, asked.body.from_block)
        if reservation.granted is not None:
            return told + self._next(reservation)
        if reservation.room is not None:  # the first read failed
            return told + self._close(reservation, body.reason)
        del self._reservations[body.migration]
        return [*told, CancelTimer(name=TIMER + body.migration), *self._refuse_rest(reservation, body.reason)]

    # The end

    def on_timer(self, migration: str, now_ns: int) -> list[Effect]:
        """A deadline, unless a read is under way, which has one of its own."""
        reservation = self._reservations.get(migration)
        if reservation is None:
            return []
        if now_ns < reservation.until_ns:
            return [StartTimer(name=TIMER + migration, at_ns=reservation.until_ns)]
        first = reservation.questions.first
        if first is not None and now_ns < self._read_until_ns(first):
            return [self._renew(reservation, now_ns)]
        if reservation.replica:
            self._ctx.figures.replicas_expired += 1
            return self._close(reservation, KvRefusal.CANCELLED)
        self._ctx.figures.reservations_expired += 1
        fields = {"migration": migration, "sequence": reservation.sequence}
        line = Log(level="warning", event="reservation_expired", fields=fields)
        return [line, *self._close(reservation, KvRefusal.CANCELLED)]

    def _close(self, reservation: SequenceReservation, reason: KvRefusal) -> list[Effect]:
        self._forget(reservation)
        return [
            UnreserveInEngine(migration=reservation.migration),
            CancelTimer(name=TIMER + reservation.migration),
            *self._refuse_rest(reservation, reason),
        ]

    def _forget(self, reservation: SequenceReservation) -> None:
        del self._reservations[reservation.migration]
        self._ended.put(reservation.migration)

    def _refuse_rest(self, reservation: SequenceReservation, reason: KvRefusal) -> list[Effect]:
        return reservation.questions.refuse_all(reservation.sequence, refused(reservation.migration, reason))

    def _renew(self, reservation: SequenceReservation, now_ns: int) -> Effect:
        reservation.until_ns = max(reservation.until_ns, now_ns + reservation.reserve_ns)
        return StartTimer(name=TIMER + reservation.migration, at_ns=reservation.until_ns)

    # For people and checkers

    def snapshot(self) -> dict[str, Any]:
        return {
            name: {
                "sequence": entry.sequence,
                "epoch": entry.epoch,
                "granted": entry.granted is not None,
                "replica": entry.replica,
                "proven": entry.proven,
            }
            for name, entry in self._reservations.items()
        }

    def check(self) -> None:
        assert len(self) <= self._config.reservations_max
        assert len(self.replicas) <= self._config.replicas.count_max
        assert not self.replicas or self._has_share(0), "replicas have more than their share"


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
