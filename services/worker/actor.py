"""The worker: sole owner of one engine, its sequences and its KV blocks.

    message in            change                                   messages out
    SubmitSequence        held, given to the engine                SequenceAccepted | SequenceRefused
    SequenceAdded         the engine has it                        SequenceAccepted to whoever waits; SequenceMoved
    SequenceRejected      gone again                               SequenceRefused INVALID
    EngineStepped         tokens kept; ended ones finished         TokensGenerated, one per ingress; status, summary
    EngineObserved        snapshot replaced                        status, summary
    EngineLiveness        the engine hangs, or is back             summary
    CancelSequence        out of the engine and gone               (nothing)
    ResendTokens          (none)                                   TokensResent | ErrorReply
    AcknowledgeSequences  finished ones gone                       (nothing)
    ReturnSequences       queued ones out of the engine and gone   SequencesReturned REQUESTED
    SetStepBudget         bound of the engine's steps, for a while  (nothing; step_budget.py)
    ChangeAdapter         adapters that it offers                  AdapterChanged, the record (adapters.py)
    ServicePresence       orphans of a dead ingress cancelled      (nothing)
    BusReconnected        marks used                               what may have been lost, again
    TimerFired            unacknowledged ends repeated, deadlines,  TokensGenerated, status, summary, presence, record
                            orphans, forgetting
    LeaseKv, Freeze-      leased, stopped, let go or let go on     KvLeased, SequenceFrozen | KvRefused
      Sequence, EndLease    (leasing.py)
    PrepareMigration,     room kept, filled, freed                 MigrationPrepared, KvPulled | KvRefused
      PullKv, UnreserveKv   (reserving.py)
    DrainWorker,          no new work; what can move moves; at     EvacuateInstance to the migrator;
      StopRequested         the limit the rest is taken out          SequencesReturned DRAINING, then Stop
    EngineFailed          everything live is lost here             SequencesReturned ENGINE_DIED, then Stop

Invariants: a sequence is held in at most one epoch; its tokens are a gapless list from ``base_index`` on; an epoch
that was held, cancelled or handed back is never taken again (fences); every accepted sequence ends in exactly one of
finish sent, cancelled by its ingress, returned, moved away, or lost with this incarnation.

A dead engine is not restarted inside the process: the worker stops, the supervisor starts a new incarnation, and
ingress sees one kind of loss only.

When overloaded: more than ``max_sequences + queue_max`` live sequences are refused FULL; finished ones that nobody
acknowledges are forgotten after a time and beyond a number, oldest first, and counted; replays of old epochs are
recognised for the last FENCES_MAX sequences.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
from millrace.actor.effects import Effect, Log, StartTimer, Subscribe, unexpected
from millrace.actor.engine import (
    AdapterLoaded,
    AdapterNotLoaded,
    CancelInEngine,
    EngineFailed,
    EngineLiveness,
    EngineObserved,
    EngineStepped,
    KvBlocksRead,
    KvDenied,
    KvLeaseTaken,
    KvRoomReserved,
    SequenceAdded,
    SequenceRejected,
    SequenceStopped,
)
from millrace.contracts.broker import MoveBid
from millrace.contracts.catalog import Role
from millrace.contracts.ingress import FinishReason, ReturnReason
from millrace.contracts.leases import EndLease, FreezeSequence, LeaseKv, PrepareMigration, PullKv, UnreserveKv
from millrace.contracts.local import (
    BusDisconnected,
    BusReconnected,
    KeyNotPut,
    KeyPut,
    Replied,
    RequestFailed,
    StopRequested,
    TimerFired,
)
from millrace.contracts.message import Message
from millrace.contracts.status import EngineDescription, PresenceState, ServicePresence
from millrace.contracts.subjects import Subjects
from millrace.contracts.worker import (
    AcknowledgeSequences,
    CancelSequence,
    ChangeAdapter,
    DrainWorker,
    ResendTokens,
    ReturnSequences,
    SetStepBudget,
    SubmitSequence,
)
from millrace.membership.services import ServiceLiveness

from services.worker import leasing, reserving, step_budget
from services.worker.adapters import Adapters
from services.worker.config import MigrationConfig, WorkerLimits
from services.worker.context import WorkerContext
from services.worker.decoding import Decoding
from services.worker.draining import DRAINED, Draining
from services.worker.identity import Identity
from services.worker.intake import Intake
from services.worker.leasing import Leasing
from services.worker.reserving import Reserving

_MS = 1_000_000
#: Heartbeat and housekeeping: presence, marks, orphans, deadlines, forgetting.
TICK_NS = 1_000 * _MS
#: The bucket drops keys after 10 s: three chances.
REGISTER_NS = 3_000 * _MS

#: Wire types that a worker takes.
ACCEPTS = (
    SubmitSequence,
    CancelSequence,
    ResendTokens,
    AcknowledgeSequences,
    DrainWorker,
    ReturnSequences,
    SetStepBudget,
    ChangeAdapter,
    ServicePresence,
    LeaseKv,
    FreezeSequence,
    EndLease,
    MoveBid,
    PrepareMigration,
    PullKv,
    UnreserveKv,
)

TICK, REGISTER = "tick", "register"
FIRST_TICK = TimerFired(name=TICK)
_DEFAULTS = MigrationConfig()


class WorkerActor:
    """One instance: the engine's sequences and what is said about them. See the module's docstring."""

    def __init__(
        self,
        *,
        identity: Identity,
        info: EngineDescription,
        subjects: Subjects,
        limits: WorkerLimits,
        rng: random.Random,
        migration: MigrationConfig = _DEFAULTS,
    ) -> None:
        self.identity = identity
        self.info = info = _with_bounds(info, migration)
        self._ctx = WorkerContext(identity=identity, info=info, subjects=subjects, limits=limits, rng=rng)
        self.ledger = self._ctx.ledger
        self.figures = self._ctx.figures
        self.reporter = self._ctx.reporter
        live_max = info.max_sequences + limits.queue_max
        self._decoding = Decoding(self._ctx)
        self._adapters = Adapters(self._ctx)
        self._leasing = Leasing(self._ctx, info, migration)
        self._reserving = Reserving(self._ctx, info, migration, live_max=live_max)
        self.reporter.moves = lambda: (len(self._leasing), len(self._reserving))
        self._intake = Intake(self._ctx, info, self._reserving, live_max=live_max)
        self._draining = Draining(self._ctx, info, subjects=subjects, limits=limits, migration=migration)
        self._ingresses = ServiceLiveness()
        self._tick_ns = 0
        self._subjects = subjects
        self._limits = limits
        self._movable = migration.enabled

    @property
    def name(self) -> str:
        return self.identity.instance

    def start(self, now_ns: int) -> list[Effect]:
        """Subscribes the instance's inbox and the ingresses' heartbeats, registers, and starts the timers."""
        return [
            Subscribe(subject=self._subjects.engine(self.name, "*")),
            Subscribe(subject=self._subjects.presences(Role.INGRESS)),
            Subscribe(subject=self._subjects.bid("*", self.name)),
            *self._on_register(now_ns),
            *self._on_tick(now_ns),
            *self.reporter.on_timer(now_ns, 0),
            *self._warn_without_moves(),
        ]

    def _warn_without_moves(self) -> list[Effect]:
        """One line where sequences cannot be moved though they should be."""
        if self.info.kv is not None or not self.info.kv_refusal or not self._movable:
            return []
        return [Log(level="warning", event="kv_moves_unavailable", fields={"why": self.info.kv_refusal})]

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        """Takes one message; once drained, the last one's effects end with Stop."""
        if self._draining.stopped:
            return unexpected(message, "this worker has stopped")
        effects = self._dispatch(message, now_ns)
        if self._leasing:
            effects = effects + self._leasing.sweep(now_ns)
        return effects + self._draining.leave_if_done(now_ns) if self._draining.under_way else effects

    def _dispatch(self, message: Message, now_ns: int) -> list[Effect]:
        """All branching by type is here."""
        match message.body:
            case EngineStepped() as body:
                return self._decoding.stepped(body, now_ns)
            case TimerFired() as body:
                return self._on_timer(body, now_ns)
            case SubmitSequence() as body:
                orphans = self._heard(body.ingress, body.ingress_incarnation, now_ns)
                incarnation = self._ingresses.incarnation(body.ingress)
                return orphans + self._intake.submit(body, message, now_ns, incarnation=incarnation)
            case SequenceAdded(sequence=sequence, kv_tokens=kv_tokens):
                return self._intake.added(sequence, kv_tokens)
            case SequenceRejected() as body:
                return self._intake.rejected(body, now_ns)
            case CancelSequence() as body:
                return self._on_cancel(body, now_ns)
            case ResendTokens() as body:
                return self._decoding.resend(body, message)
            case AcknowledgeSequences() as body:
                return self._decoding.acknowledge(body)
            case ServicePresence() as body:
                return self._on_presence(body, now_ns)
            case EngineObserved(snapshot=snapshot):
                self.reporter.take(snapshot)
                return self._ctx.reports(now_ns)
            case EngineLiveness() as body:
                self.reporter.liveness = body
                return [self.reporter.summary(now_ns, self.figures.output_tokens)] if self.reporter.bus_up else []
            case BusDisconnected():
                self.reporter.bus_up = False
                return []
            case BusReconnected():
                return self._on_reconnected(now_ns)
            case LeaseKv() as body:
                return self._leasing.lease(body, message.reply_to, now_ns)
            case FreezeSequence() as body:
                return self._leasing.freeze(body, message.reply_to, now_ns)
            case EndLease() as body:
                return self._leasing.end(body, now_ns)
            case KvLeaseTaken() as body:
                return self._leasing.taken(body, now_ns)
            case SequenceStopped() as body:
                return self._leasing.stopped(body, now_ns)
            case KvDenied(migration=migration) as body if migration in self._leasing:
                return self._leasing.denied(body, now_ns)
            case MoveBid() as body:
                self._reserving.on_bid(body, now_ns)
                return []
            case PrepareMigration() as body:
                return self._reserving.prepare(body, message.reply_to, now_ns)
            case PullKv() as body:
                return self._reserving.pull(body, message.reply_to, now_ns)
            case UnreserveKv() as body:
                return self._reserving.unreserve(body)
            case KvRoomReserved() as body:
                return self._reserving.reserved(body, now_ns)
            case KvBlocksRead() as body:
                return self._reserving.read(body, now_ns)
            case KvDenied() as body:
                return self._reserving.denied(body)
            case ReturnSequences() as body:
                return self._on_return(body, now_ns)
            case SetStepBudget() as body:
                return self._ctx.budget.order(body, now_ns)
            case ChangeAdapter() as body:
                return self._adapters.change(body, message.reply_to)
            case AdapterLoaded(adapter=adapter):
                return self._adapters.loaded(adapter)
            case AdapterNotLoaded() as body:
                return self._adapters.refused(body)
            case DrainWorker(limit_ms=limit_ms):
                return self._draining.begin(now_ns, limit_ms, "drain requested")
            case StopRequested():
                return self._draining.begin(now_ns, self._limits.drain_limit_ms, "stop requested")
            case Replied() | RequestFailed() as body:
                return self._draining.evacuated(body)
            case EngineFailed(detail=detail):
                return self._draining.engine_failed(detail, now_ns)
            case KeyPut() | KeyNotPut():
                return []
            case _:
                return unexpected(message, f"a worker does not take {type(message.body).__name__}")

    # --- removal

    def _on_cancel(self, body: CancelSequence, now_ns: int) -> list[Effect]:
        held = self.ledger.get(body.sequence)
        self.ledger.fence(body.sequence, body.epoch)
        dropped = self._reserving.drop_replicas(body.sequence, body.epoch)
        if held is None or held.epoch > body.epoch:
            return dropped
        return dropped + self._ctx.remove([held], now_ns, f"cancelled: {body.reason or 'no reason given'}")

    def _on_return(self, body: ReturnSequences, now_ns: int) -> list[Effect]:
        """Hands back those that wait without KV, by the engine's last snapshot. While the bus is away nobody would hear
        of it.
        """
        queued = {status.sequence for status in self.reporter.snapshot.waiting if not status.blocks}
        held = [held for name in body.sequences if name in queued and (held := self.ledger.get(name)) is not None]
        group = [each for each in held if each.live and each.added and not self._leasing.freezes(each)]
        if not group or not self.reporter.bus_up:
            return []
        returned = self._ctx.hand_back(group, ReturnReason.REQUESTED)
        return returned + self._ctx.remove(group, now_ns, "handed back: requested")

    def _on_presence(self, body: ServicePresence, now_ns: int) -> list[Effect]:
        if body.role != Role.INGRESS:
            return []
        if body.state is PresenceState.DEAD:
            known = self._ingresses.incarnation(body.name)
            return self._cancel_orphans(body.name, body.incarnation or min(known, body.at_ns), now_ns, "ingress died")
        return self._heard(body.name, body.incarnation, now_ns)

    def _heard(self, ingress: str, incarnation: int, now_ns: int) -> list[Effect]:
        """A sign of life; a new incarnation leaves the older one's sequences orphaned."""
        self._ingresses.heard(ingress, now_ns)
        if not self._ingresses.renewed(ingress, incarnation):
            return []
        return self._cancel_orphans(ingress, incarnation - 1, now_ns, "ingress restarted")

    def _cancel_orphans(self, ingress: str, incarnation_max: int, now_ns: int, why: str) -> list[Effect]:
        orphans = self.ledger.of_ingress(ingress, incarnation_max=incarnation_max)
        if not orphans:
            return []
        self.figures.orphans += sum(held.live for held in orphans)
        line = Log(
            level="warning", event="orphans_cancelled", fields={"ingress": ingress, "why": why, "n": len(orphans)}
        )
        return [line, *self._ctx.remove(orphans, now_ns, why)]

    # --- time

    def _on_timer(self, fired: TimerFired, now_ns: int) -> list[Effect]:
        match name := fired.name:
            case "tick":
                return self._on_tick(now_ns, fired)
            case "report":
                return self.reporter.on_timer(now_ns, self.figures.output_tokens, fired.at_ns)
            case "register":
                return [StartTimer.again(fired, now_ns, REGISTER_NS), *self.reporter.register()]
            case "drain":
                return self._draining.on_limit(now_ns)
            case step_budget.TIMER:
                return self._ctx.budget.on_timer(now_ns)
            case "linger":
                return self._draining.leave(now_ns, DRAINED)
            case _ if name.startswith(leasing.TIMER):
                return self._leasing.on_timer(name.removeprefix(leasing.TIMER), now_ns)
            case _:
                return self._reserving.on_timer(name.removeprefix(reserving.TIMER), now_ns)

    def _on_tick(self, now_ns: int, fired: TimerFired = FIRST_TICK) -> list[Effect]:
        again = StartTimer.again(fired, now_ns, TICK_NS)
        still_ns, self._tick_ns = now_ns - (self._tick_ns or now_ns), again.at_ns
        self._ingresses.excuse(still_ns, now_ns)  # this process stood still; what came meanwhile waits
        effects: list[Effect] = [again]
        if self.reporter.bus_up:
            effects.append(self.reporter.presence(now_ns))
            effects += self._ctx.remind(now_ns)
            for held in self.ledger:
                held.tick()
            for ingress in self._ingresses.take_silent(now_ns, silence_ns=self._limits.ingress_silence_ms * _MS):
                known = self._ingresses.incarnation(ingress)
                effects += self._cancel_orphans(ingress, known, now_ns, "ingress silent")
        forgotten = self.ledger.forget(
            now_ns, ttl_ns=self._limits.finished_ttl_ms * _MS, finished_max=self._limits.finished_max
        )
        if forgotten:
            effects.append(Log(level="warning", event="unacknowledged_forgotten", fields={"n": len(forgotten)}))
        return effects + self._expire(now_ns)

    def _expire(self, now_ns: int) -> list[Effect]:
        """Ends sequences past their deadline: the ingress has failed the call by then, and may have forgotten it."""
        late = [h for h in self.ledger if h.live and h.deadline_ns is not None and now_ns >= h.deadline_ns]
        if not late:
            return []
        for held in late:
            self._ctx.finish(held, FinishReason.CANCELLED, now_ns, "past its deadline")
        self.figures.expired += len(late)
        cancel = CancelInEngine(sequences=[held.sequence for held in late])
        ended = [span for held in late for span in self._ctx.spans(held, now_ns, "past its deadline")]
        return [cancel, *self._ctx.publish(late), *ended]

    def _on_register(self, now_ns: int) -> list[Effect]:
        return [StartTimer(name=REGISTER, at_ns=now_ns + REGISTER_NS), *self.reporter.register()]

    # --- the bus goes and comes

    def _on_reconnected(self, now_ns: int) -> list[Effect]:
        """Says again what may have been lost: everything since the older mark, which froze when the bus went away.

        Ingress drops by index what it has. Without this a stream whose last tokens were lost would never end, since
        no later message would show it a gap.
        """
        self.reporter.bus_up = True
        self._ingresses.excuse(now_ns, now_ns)
        told = [*self._on_register(now_ns), self.reporter.presence(now_ns), *self._ctx.repeat()]
        return told + self._draining.on_reconnected(now_ns)

    # --- for people and checkers

    def snapshot(self) -> dict[str, Any]:
        remaining = self.reporter.remaining
        return {
            "instance": self.name,
            "live": self.ledger.live,
            "held": len(self.ledger),
            "draining": self.reporter.draining,
            "stopped": self._draining.stopped,
            "bus_up": self.reporter.bus_up,
            "sequences": {h.sequence: [h.epoch, len(h.token_ids), str(h.finish or "")] for h in self.ledger},
            "leases": self._leasing.snapshot(),
            "reservations": self._reserving.snapshot(),
            "remaining": {"outcomes": remaining.survival.outcomes, "ignored": remaining.ignored},
            "step_budget": self._ctx.budget.tokens,
            "figures": self.figures.plain(),
        }

    def check_invariants(self) -> None:
        self.ledger.check()
        self.reporter.check(self.ledger)
        self._leasing.check()
        self._reserving.check()
        assert self.ledger.live <= self._intake.live_max, "queue bound"


def _with_bounds(info: EngineDescription, migration: MigrationConfig) -> EngineDescription:
    """Whoever asks for a freeze must know how long one lasts at most: it stands with the rest of the endpoint."""
    if info.kv is None:
        return info
    kv = msgspec.structs.replace(info.kv, freeze_ms_max=migration.freeze_ms_max)
    return msgspec.structs.replace(info, kv=kv)
