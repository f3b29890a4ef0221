"""Everything of a worker that concerns moving sequences, behind one door: leases on one side, reservations on the
other.
"""

from __future__ import annotations

from typing import Any

from millrace.actor.effects import Effect
from millrace.actor.engine import EngineInfo, KvBlocksRead, KvDenied, KvLeaseTaken, KvRoomReserved, SequenceStopped
from millrace.contracts.leases import EndLease, FreezeSequence, LeaseKv, PrepareMigration, PullKv, UnreserveKv
from millrace.contracts.message import Message

from services.worker import leasing, reserving
from services.worker.config import MigrationConfig
from services.worker.context import WorkerContext
from services.worker.leasing import Leasing
from services.worker.reserving import Reserving
from services.worker.state import Held

#: What a migrator asks.
Asking = LeaseKv | FreezeSequence | EndLease | PrepareMigration | PullKv | UnreserveKv
#: What the engine answers.
Answer = KvLeaseTaken | SequenceStopped | KvRoomReserved | KvBlocksRead | KvDenied


class Moving:
    """Routes questions, answers and deadlines to leases and reservations.

    Attributes:
        reserving: Rooms for sequences to come; the intake claims them.
    """

    def __init__(self, ctx: WorkerContext, info: EngineInfo, config: MigrationConfig, *, live_max: int) -> None:
        self._leasing = Leasing(ctx, info, config)
        self.reserving = Reserving(ctx, info, config, live_max=live_max)

    def freezes(self, held: Held) -> bool:
        """Whether a sequence stands still to be taken over, or has been asked to."""
        return self._leasing.freezes(held)

    def ask(self, body: Asking, message: Message, now_ns: int) -> list[Effect]:
        """A migrator's question."""
        reply_to = message.reply_to
        match body:
            case LeaseKv():
                return self._leasing.lease(body, reply_to, now_ns)
            case FreezeSequence():
                return self._leasing.freeze(body, reply_to, now_ns)
            case EndLease():
                return self._leasing.end(body, now_ns)
            case PrepareMigration():
                return self.reserving.prepare(body, reply_to, now_ns)
            case PullKv():
                return self.reserving.pull(body, reply_to, now_ns)
            case UnreserveKv():
                return self.reserving.unreserve(body)

    def hear(self, body: Answer, now_ns: int) -> list[Effect]:
        """The engine's answer; one that nobody waits for any more changes nothing."""
        match body:
            case KvLeaseTaken():
                return self._leasing.taken(body, now_ns)
            case SequenceStopped():
                return self._leasing.stopped(body, now_ns)
            case KvRoomReserved():
                return self.reserving.reserved(body, now_ns)
            case KvBlocksRead():
                return self.reserving.read(body, now_ns)
            case KvDenied(migration=migration) if migration in self._leasing:
                return self._leasing.denied(body, now_ns)
            case KvDenied():
                return self.reserving.denied(body)

    def on_timer(self, name: str, now_ns: int) -> list[Effect]:
        """A deadline of a lease or a reservation; any other timer is nobody's."""
        kind, slash, migration = name.partition("/")
        match kind + slash:
            case leasing.TIMER:
                return self._leasing.on_timer(migration, now_ns)
            case reserving.TIMER:
                return self.reserving.on_timer(migration, now_ns)
            case _:
                return []

    @property
    def leases(self) -> int:
        return len(self._leasing)

    def counts(self) -> tuple[int, int]:
        """Sequences whose KV leaves, and those whose KV arrives."""
        return len(self._leasing), len(self.reserving)

    def sweep(self, now_ns: int) -> list[Effect]:
        """After every message: leases of sequences that ended with it are over."""
        return self._leasing.sweep(now_ns) if len(self._leasing) else []

    def snapshot(self) -> dict[str, Any]:
        return {"leases": self._leasing.snapshot(), "reservations": self.reserving.snapshot()}

    def check(self) -> None:
        self._leasing.check()
        self.reserving.check()
