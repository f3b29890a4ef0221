"""Migrators in virtual time, with workers and an ingress that only know the words of the handshake."""

import heapq
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
from millrace.actor.config import BusConfig
from millrace.actor.effects import CancelTimer, Effect, Publish, RecordSpan, Reply, Request, StartTimer, Stop
from millrace.contracts.broker import LoadReported, LoadsReported, MoveReason
from millrace.contracts.kv import CopierKind, KvEndpoint, KvRefusal
from millrace.contracts.leases import (
    EndLease,
    FreezeSequence,
    KvLeased,
    KvPulled,
    KvRefused,
    LeaseKv,
    MigrationPrepared,
    PrepareMigration,
    PullKv,
    SequenceFrozen,
    UnreserveKv,
)
from millrace.contracts.local import KeyChanged, Replied, RequestFailed, RequestFailure, StopRequested, TimerFired
from millrace.contracts.message import Body, Message
from millrace.contracts.migration import AllotEpoch, EpochAllotted, MigrationFinished, MoveSequence
from millrace.contracts.status import InstanceRecord, SequenceState, SequenceStatus, StatusSnapshot
from millrace.contracts.worker import RefusalReason, Sampling, SequenceAccepted, SequenceRefused, SubmitSequence

from services.migrator.actor import MigratorActor
from services.migrator.config import MigratorConfig, MigratorLimits
from services.migrator.metrics import MigratorMetrics
from tests.testbed.messages import plain, plain_record, plain_snapshot

MS = 1_000_000
START_NS = 1_000_000 * MS
HOP_NS = 50_000
TOKEN_NS = 5 * MS
BLOCK_TOKENS = 4
MODEL = "m"
TRACE = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


def endpoint(**changes: Any) -> KvEndpoint:
    return plain(KvEndpoint, block_tokens=BLOCK_TOKENS, **changes)


def record(name: str, **changes: Any) -> InstanceRecord:
    return plain_record(name, **{"incarnation": 5, "block_size": BLOCK_TOKENS, "kv": endpoint()} | changes)


class FakeSequence:
    """A sequence that gets a token every TOKEN_NS unless it stands still."""

    def __init__(self, submission: SubmitSequence, now_ns: int) -> None:
        self.submission = submission
        self.since_ns = now_ns
        self.frozen: list[int] | None = None
        self.thaws_ns = 0

    def outputs(self, now_ns: int) -> list[int]:
        if self.frozen is not None:
            return self.frozen
        brought = self.submission.output_token_ids
        new = (now_ns - self.since_ns) // TOKEN_NS
        return [*brought, *range(len(brought), len(brought) + new)]


class FakeWorker:
    """Answers its migrator. ``refuse``: what it says no to, by type of the question."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sequences: dict[str, FakeSequence] = {}
        self.refuse: dict[type[Body], KvRefusal] = {}
        self.reserved: dict[str, int] = {}
        self.leases: set[str] = set()
        self.blocks_free = 80
        self.draining = False
        self.read: list[tuple[int, int]] = []  # (from, to) positions
        self.pull_ns = 2 * MS
        self.slow_ns = 0  # an answer waits for the end of a step
        self.clock_ns: int | None = 0  # by how much its clock is ahead; None: it does not say
        self.matched = 0
        self.reservations_max = 3
        self.kv_moves = True
        self.freeze_ms_max = 0  # 0: it neither tells nor keeps one

    def answer(self, body: Body, now_ns: int) -> Body | None:
        self._thaw(now_ns)
        refusal = self.refuse.get(type(body))
        if refusal is not None:
            if isinstance(body, SubmitSequence):
                return SequenceRefused(sequence=body.sequence, epoch=body.epoch, reason=RefusalReason.DRAINING)
            return KvRefused(migration=body.migration, reason=refusal)  # type: ignore[attr-defined]
        match body:
            case LeaseKv():
                return self._lease(body, now_ns)
            case FreezeSequence():
                return self._freeze(body, now_ns)
            case EndLease():
                self._end(body, now_ns)
            case PrepareMigration():
                return self._prepare(body, now_ns)
            case PullKv():
                self.read.append((body.from_block, body.from_block + len(body.blocks)))
                copied = self._copied(len(body.blocks), now_ns)
                return KvPulled(migration=body.migration, from_block=body.from_block, **copied)
            case SubmitSequence():
                self.reserved.pop(body.handover.migration if body.handover else "", None)
                self.sequences[body.sequence] = FakeSequence(body, now_ns)
                return SequenceAccepted(sequence=body.sequence, epoch=body.epoch)
            case UnreserveKv():
                self.reserved.pop(body.migration, None)
        return None

    def _lease(self, body: LeaseKv, now_ns: int) -> Body:
        held = self.sequences.get(body.sequence)
        if held is None:
            return KvRefused(migration=body.migration, reason=KvRefusal.UNKNOWN_SEQUENCE)
        self.leases.add(body.migration)
        outputs = held.outputs(now_ns)
        prompt = len(held.submission.prompt_token_ids)
        full = (prompt + len(outputs) - 1) // BLOCK_TOKENS
        first = body.from_block == 0
        return KvLeased(
            migration=body.migration,
            sequence=body.sequence,
            epoch=held.submission.epoch,
            from_block=body.from_block,
            blocks=[[block] for block in range(100 + body.from_block, 100 + full)],
            prompt_tokens=prompt,
            output_tokens=len(outputs),
            computed_tokens=prompt + len(outputs) - 1,
            checksums=[list(range(body.from_block, full))],
            submission=msgspec.structs.replace(held.submission, output_token_ids=outputs) if first else None,
            endpoint=endpoint(freeze_ms_max=self.freeze_ms_max) if first and self.kv_moves else None,
        )

    def _prepare(self, body: PrepareMigration, now_ns: int) -> Body:
        if len(self.reserved) >= self.reservations_max:
            return KvRefused(migration=body.migration, reason=KvRefusal.TOO_MANY)
        self.reserved[body.migration] = body.blocks
        count = max(0, len(body.pull) - self.matched)
        if count and PullKv in self.refuse:
            del self.reserved[body.migration]
            return KvRefused(migration=body.migration, reason=self.refuse[PullKv])
        self.read += [(self.matched, self.matched + count)] if count else []
        copied = self._copied(count, now_ns)
        return MigrationPrepared(migration=body.migration, matched_blocks=self.matched, **copied)

    def _copied(self, blocks: int, now_ns: int) -> dict[str, Any]:
        """The fields of an answer that tell of a read."""
        took = {"descriptors": int(blocks > 0), "duration_ns": self.pull_ns if blocks else 0}
        shown_ns = 0 if self.clock_ns is None else now_ns + self.clock_ns
        return {"copier": CopierKind.MODELLED, "blocks": blocks, "bytes": 1_000 * blocks, "at_ns": shown_ns, **took}

    def _freeze(self, body: FreezeSequence, now_ns: int) -> Body:
        held = self.sequences.get(body.sequence)
        if held is None or body.migration not in self.leases:
            return KvRefused(migration=body.migration, reason=KvRefusal.LEASE_LOST)
        full = (len(held.submission.prompt_token_ids) + len(held.outputs(now_ns)) - 1) // BLOCK_TOKENS
        if body.new_blocks_max is not None and full - body.from_block > body.new_blocks_max:
            fields = {
                name: getattr(body, name) for name in ("migration", "sequence", "epoch", "from_block", "lease_ms")
            }
            return self._lease(LeaseKv(**fields), now_ns)
        held.frozen = held.outputs(now_ns)
        held.thaws_ns = now_ns + min(body.freeze_ms, self.freeze_ms_max or body.freeze_ms) * MS
        tokens = len(held.submission.prompt_token_ids) + len(held.frozen)
        return SequenceFrozen(
            migration=body.migration,
            sequence=body.sequence,
            epoch=body.epoch,
            from_block=body.from_block,
            blocks=[[block] for block in range(100 + body.from_block, 100 + -(-tokens // BLOCK_TOKENS))],
            output_token_ids=held.frozen,
            computed_tokens=tokens - 1,
            frozen_ns=now_ns,
        )

    def _end(self, body: EndLease, now_ns: int) -> None:
        held, leased = self.sequences.get(body.sequence), body.migration in self.leases
        self.leases.discard(body.migration)
        if held is not None and body.moved and (leased or not self.freeze_ms_max):
            del self.sequences[body.sequence]
        elif held is not None and held.frozen is not None:
            self._go_on(body.sequence, held, now_ns)

    def _thaw(self, now_ns: int) -> None:
        """Whoever has stood still for as long as it may goes on, and its lease is over."""
        for name, held in list(self.sequences.items()):
            if held.frozen is not None and self.freeze_ms_max and now_ns >= held.thaws_ns:
                self.leases.clear()
                self._go_on(name, held, held.thaws_ns)

    def _go_on(self, name: str, held: FakeSequence, since_ns: int) -> None:
        assert held.frozen is not None
        submission = msgspec.structs.replace(held.submission, output_token_ids=held.frozen)
        self.sequences[name] = FakeSequence(submission, since_ns)

    def load(self, now_ns: int) -> LoadReported:
        room = {"blocks_free": self.blocks_free, "draining": self.draining, "running": len(self.sequences)}
        return plain(LoadReported, instance=self.name, stage="", plan_epoch=-1, at_ns=now_ns, **room)

    def snapshot(self, now_ns: int) -> StatusSnapshot:
        return plain_snapshot(
            self.name,
            incarnation=5,
            model=MODEL,
            at_ns=now_ns,
            running=[_status(name, held, now_ns) for name, held in self.sequences.items()],
            blocks_free=self.blocks_free,
        )


def _status(name: str, held: FakeSequence, now_ns: int) -> SequenceStatus:
    outputs = len(held.outputs(now_ns))
    prompt = len(held.submission.prompt_token_ids)
    return SequenceStatus(
        sequence=name,
        state=SequenceState.RUNNING,
        prompt_tokens=prompt,
        computed_tokens=prompt + outputs - 1,
        output_tokens=outputs,
        max_tokens=1_000,
        blocks=-(-(prompt + outputs) // BLOCK_TOKENS),
        arrival_ns=START_NS,
    )


Judge = Callable[[str, Body], bool]


class Rig:
    """Migrators of ``names``, one each, whose messages take HOP_NS; ``lose`` says which do not arrive.

    Attributes:
        said: (sender, body) of every request, publication and answer, in order.
        answers: What the outside asker ``x`` was answered.
    """

    def __init__(self, *names: str, limits: MigratorLimits | None = None, **config: Any) -> None:
        self.now_ns = START_NS
        self.workers = {name: FakeWorker(name) for name in names}
        self.epochs: dict[str, int] = {}
        self.refuse_epochs = False
        self.said: list[tuple[str, Body]] = []
        self.answers: list[Body] = []
        self.spans: list[RecordSpan] = []
        self.stopped: set[str] = set()
        self.lose: Judge = lambda sender, body: False
        self.migrators = {}
        for name in names:
            fields = {"limits": limits or MigratorLimits(), **config}
            built = MigratorConfig(name=f"migrator-{name}", instances=[name], bus=BusConfig(cluster="c"), **fields)
            metrics = MigratorMetrics()
            self.migrators[name] = MigratorActor(config=built, incarnation=1, rng=Random(name), metrics=metrics)
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0
        self._timers: dict[tuple[str, str], int] = {}
        self._asked: dict[str, tuple[str, str]] = {}
        for name in names:
            self._carry(name, self.migrators[name].start(self.now_ns))
        for name in names:
            self.register(record(name))
        self.hear()

    # what surrounds the migrators

    def register(self, value: InstanceRecord) -> None:
        self.tell(KeyChanged(bucket="instance", key=value.instance, value=value, revision=1))

    def tell(self, body: Body) -> None:
        for name in self.migrators:
            self.deliver(name, Message(body))

    def hear(self) -> None:
        """Every worker's load and snapshot, now and every 50 ms."""
        for worker in self.workers.values():
            self.tell(LoadsReported(loads=[worker.load(self.now_ns)]))
            self.tell(worker.snapshot(self.now_ns))
        self._at(self.now_ns + 50 * MS, self.hear)

    def decode(
        self, instance: str, sequence: str = "r.0", *, prompt: int = 40, outputs: int = 4, epoch: int = 3
    ) -> None:
        """A sequence runs there."""
        tokens = {"prompt_token_ids": list(range(prompt)), "output_token_ids": list(range(outputs))}
        sampling = Sampling(max_tokens=1_000)
        submission = plain(SubmitSequence, sequence=sequence, epoch=epoch, sampling=sampling, **tokens)
        self.workers[instance].sequences[sequence] = FakeSequence(submission, self.now_ns)
        self.epochs[sequence] = epoch

    # asking

    def order(self, sequence: str = "r.0", source: str = "a", **fields: Any) -> None:
        """Its broker orders a move."""
        self.ask(source, MoveSequence(sequence=sequence, **{"target": "b", "reason": MoveReason.ORDER, **fields}))

    def ask(self, instance: str, body: Body, verb: str = "move") -> None:
        self.deliver(instance, Message(body, f"mr.c.migrate.{instance}.{verb}", "x", f"x.{len(self.said)}"))

    def migrate(
        self, sequence: str = "r.0", source: str = "a", run_ms: int = 3_000, **fields: Any
    ) -> MigrationFinished:
        """Asks, runs, returns the last MigrationFinished that was answered."""
        self.order(sequence, source, **fields)
        self.run(run_ms)
        found = [body for body in self.answers if isinstance(body, MigrationFinished)]
        assert found, f"no answer; said {self.words()}"
        return found[-1]

    def stop(self, instance: str) -> None:
        self.deliver(instance, Message(StopRequested()))

    def words(self) -> list[str]:
        """Types of what was said, in order, without heartbeats."""
        names = [type(body).__name__ for _, body in self.said]
        return [name for name in names if name != "ServicePresence"]

    def published(self, kind: type[Body]) -> list[Any]:
        return [body for _, body in self.said if type(body) is kind]

    # time and messages

    def run(self, span_ms: int) -> None:
        until_ns = self.now_ns + span_ms * MS
        while self._events and self._events[0][0] <= until_ns:
            at_ns, _, act = heapq.heappop(self._events)
            self.now_ns = at_ns
            act()
            for actor in self.migrators.values():
                actor.check_invariants()
        self.now_ns = until_ns

    def deliver(self, name: str, message: Message) -> None:
        if name not in self.stopped:
            self._carry(name, self.migrators[name].handle(message, self.now_ns))

    def kill(self, instance: str) -> None:
        """Its migrator says and hears nothing more."""
        self.stopped.add(instance)

    def _at(self, at_ns: int, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (at_ns, self._count, act))

    def _carry(self, name: str, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Request():
                    self._request(name, effect)
                case Publish():
                    self.said.append((name, effect.body))
                    if not self.lose(name, effect.body):
                        message = Message(effect.body, effect.subject, name, "", effect.traceparent)
                        self._at(self.now_ns + HOP_NS, lambda m=message: self._arrive(m))  # type: ignore[misc]
                case Reply():
                    self.said.append((name, effect.body))
                    if not self.lose(name, effect.body):
                        self._at(self.now_ns + HOP_NS, lambda e=effect: self._answered(e.to, e.body))  # type: ignore[misc]
                case StartTimer():
                    self._timers[(name, effect.name)] = effect.at_ns
                    self._at(effect.at_ns, lambda e=effect: self._fire(name, e))  # type: ignore[misc]
                case CancelTimer():
                    self._timers.pop((name, effect.name), None)
                case RecordSpan():
                    self.spans.append(effect)
                case Stop():
                    self.stopped.add(name)

    def _fire(self, name: str, timer: StartTimer) -> None:
        if self._timers.get((name, timer.name)) == timer.at_ns:
            del self._timers[(name, timer.name)]
            self.deliver(name, Message(TimerFired(name=timer.name)))

    def _request(self, name: str, effect: Request) -> None:
        self.said.append((name, effect.body))
        reply_to = f"{name}!{effect.correlation}"
        self._asked[reply_to] = (name, effect.correlation)
        self._at(self.now_ns + effect.timeout_ns, lambda: self._unanswered(reply_to, RequestFailure.TIMEOUT))
        if not self.lose(name, effect.body):
            message = Message(effect.body, effect.subject, name, reply_to, effect.traceparent)
            self._at(self.now_ns + HOP_NS, lambda: self._arrive(message))

    def _unanswered(self, reply_to: str, reason: RequestFailure) -> None:
        known = self._asked.pop(reply_to, None)
        if known is not None:
            self.deliver(known[0], Message(RequestFailed(correlation=known[1], reason=reason)))

    def _answered(self, reply_to: str, body: Body, traceparent: str = "") -> None:
        known = self._asked.pop(reply_to, None)
        if known is not None:
            self.deliver(known[0], Message(Replied(correlation=known[1], body=body), "", "", "", traceparent))
        elif reply_to.startswith("x."):
            self.answers.append(body)

    def _arrive(self, message: Message) -> None:
        tokens = message.subject.split(".")
        if tokens[2] == "migrate" and tokens[3] in self.migrators:
            if tokens[3] in self.stopped:
                self._unanswered(message.reply_to, RequestFailure.NO_RESPONDERS)
            self.deliver(tokens[3], message)
        elif tokens[2] == "engine" and tokens[3] in self.workers:
            self._ask_worker(self.workers[tokens[3]], message)
        elif tokens[2] == "epoch":
            self._reply_later(message, self._epoch(message.body), HOP_NS)
        elif message.reply_to:
            self._unanswered(message.reply_to, RequestFailure.NO_RESPONDERS)

    def _ask_worker(self, worker: FakeWorker, message: Message) -> None:
        answer = worker.answer(message.body, self.now_ns)
        reads = isinstance(message.body, PullKv) or (isinstance(answer, MigrationPrepared) and answer.blocks > 0)
        took_ns = worker.pull_ns + worker.slow_ns if reads else HOP_NS + worker.slow_ns
        if answer is not None:
            self._reply_later(message, answer, took_ns)

    def _reply_later(self, message: Message, answer: Body, took_ns: int) -> None:
        self.said.append(("world", answer))
        if not self.lose("world", answer):
            self._at(self.now_ns + took_ns, lambda: self._answered(message.reply_to, answer, TRACE))

    def _epoch(self, body: AllotEpoch) -> Body:
        if self.refuse_epochs:
            return KvRefused(migration=body.migration, reason=KvRefusal.EPOCH_REFUSED, detail="it has ended")
        self.epochs[body.sequence] += 1
        return EpochAllotted(migration=body.migration, sequence=body.sequence, epoch=self.epochs[body.sequence])
