"""The migrator: carries out the moves that brokers order.

Owns every migration from its instances and drives it: it asks the workers of both sides. It owns no sequence and no
block: a worker does, before and after, and ingress judges whose tokens count; so nothing is lost where a migrator dies,
and each deadline that matters is kept by a worker as well. It decides nothing: what leaves and where to, the instance's
broker says. KV replicas are its own (replicas.py).

| message in | change | messages out |
|---|---|---|
| MoveSequence | a migration begins | LeaseKv; in the end MigrationFinished |
| Replied, RequestFailed (out/...) | the next step, see outgoing.py | AllotEpoch, PrepareMigration, PullKv, LeaseKv,
FreezeSequence, SubmitSequence, EndLease, UnreserveKv, MigrationFinished |
| StatusSnapshot | which sequences get KV replicas | LeaseKv |
| Replied, RequestFailed (replica/...) | a replica's next step, see replicas.py | PrepareMigration, PullKv, LeaseKv,
EndLease, KvReplicated |
| KeyChanged, LoadsReported | who there is, and who has room for replicas | |
| TimerFired | heartbeat; a replica may copy again | ServicePresence, next timer |
| StopRequested | everything is given up; nobody waits in vain | UnreserveKv, EndLease, ServicePresence, Stop |

Invariants: a sequence moves once at a time; every MoveSequence is answered once.

Overload: beyond ``MIGRATIONS_MAX`` orders are refused TOO_MANY. Each migration has a deadline at every step.
"""

from __future__ import annotations

from random import Random
from typing import Any

from millrace.actor.effects import Effect, Log, Publish, StartTimer, Stop, Subscribe, WatchKeys, unexpected
from millrace.contracts.broker import LoadsReported
from millrace.contracts.catalog import Role
from millrace.contracts.local import KeyChanged, Replied, RequestFailed, RequestFailure, StopRequested, TimerFired
from millrace.contracts.message import Body, Message
from millrace.contracts.migration import MoveSequence
from millrace.contracts.status import InstanceMigrations, InstanceRecord, StatusSnapshot
from millrace.contracts.subjects import Subjects, subject_token
from millrace.membership.heartbeat import Heartbeat

from services.migrator.config import MigratorConfig
from services.migrator.context import MS, OUT, REPLICA, KnownInstances, MigratorContext
from services.migrator.metrics import MigratorMetrics
from services.migrator.outgoing import OutgoingMigrations
from services.migrator.replicas import Replicas
from services.migrator.state import ManagedInstance, MigrationStep

#: Heartbeat.
TICK_NS = 1_000 * MS
TICK = TimerFired(name="tick")

#: Migrations told of with a heartbeat: one of a screen's height, and some 3 KB.
TOLD_MAX = 32

#: Wire types that a migrator takes.
ACCEPTS: tuple[type[Body], ...] = (LoadsReported, MoveSequence, StatusSnapshot)


class MigratorActor:
    """The migrator of one instance, or of those that share a worker process."""

    def __init__(self, *, config: MigratorConfig, incarnation: int, rng: Random, metrics: MigratorMetrics) -> None:
        """``rng`` gives names of migrations and span ids."""
        self.name = config.name
        self._subjects = Subjects(config.bus.cluster)
        self._config = config
        self._heartbeat = Heartbeat(
            subjects=self._subjects, role=Role.MIGRATOR, name=config.name, incarnation=incarnation
        )
        self._records = KnownInstances()
        context = MigratorContext(
            config=config, subjects=self._subjects, rng=rng, records=self._records, metrics=metrics
        )
        self._outgoing = OutgoingMigrations(context)
        self._replicas = Replicas(context, self._outgoing)
        self._managed = {subject_token(name): ManagedInstance(instance=name) for name in config.instances}
        metrics.instances = self._counts

    def start(self, now_ns: int) -> list[Effect]:
        subjects = [self._subjects.migrate(managed.instance, "move") for managed in self._managed.values()]
        if self._config.replicas.enabled:
            subjects += [f"{self._subjects.prefix}.status.*.{token}" for token in self._managed]
            subjects.append(self._subjects.loads())
        watched = [WatchKeys(bucket="instance"), WatchKeys(bucket="plan")]
        return [*watched, *(Subscribe(subject=subject) for subject in subjects), *self._on_timer(TICK, now_ns)]

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        effects = self._dispatch(message, now_ns)
        ended, self._outgoing.finished = self._outgoing.finished, []
        for body in ended:
            effects += self._replicas.on_finished(body, now_ns)
        return [*self._replicas.make_way(now_ns), *effects]

    def _dispatch(self, message: Message, now_ns: int) -> list[Effect]:
        match message.body:
            case Replied(correlation=correlation, body=body):
                return self._on_answer(correlation, body, message.traceparent, now_ns)
            case RequestFailed(correlation=correlation, reason=reason):
                return self._on_answer(correlation, reason, "", now_ns)
            case MoveSequence() as body:
                return self._on_order(message, body, now_ns)
            case StatusSnapshot() as body:
                managed = self._managed.get(subject_token(body.instance)) if body.instance else None
                return self._replicas.on_snapshot(managed, body, now_ns) if managed is not None else []
            case LoadsReported(loads=loads):
                for load in loads:
                    self._records.on_load(load, now_ns)
                return []
            case KeyChanged() as body:
                self._records.on_key(body)
                return self._on_record(body.value) if body.bucket == "instance" else []
            case TimerFired() as body:
                return self._on_timer(body, now_ns)
            case StopRequested():
                return self._on_stop(now_ns)
            case _:
                return unexpected(message, f"a migrator does not take {type(message.body).__name__}")

    def _on_record(self, record: Any) -> list[Effect]:
        """Says once where a worker of ours lets its sequences stand still for less than we are set to ask."""
        kv = record.kv if isinstance(record, InstanceRecord) else None
        managed = self._managed.get(subject_token(record.instance)) if kv is not None else None
        if kv is None or managed is None or kv.freeze_ms_max == managed.freeze_ms_max:
            return []
        managed.freeze_ms_max = kv.freeze_ms_max
        limits = self._config.limits
        if not kv.freeze_ms_max or max(limits.freeze_ms, limits.copy_freeze_ms) <= kv.freeze_ms_max:
            return []
        fields = {name: getattr(limits, name) for name in ("copy_freeze_ms", "freeze_ms")}
        fields |= {"instance": managed.instance, "freeze_ms_max": kv.freeze_ms_max}
        return [Log(level="warning", event="freezes_shortened", fields=fields)]

    def _on_order(self, message: Message, body: MoveSequence, now_ns: int) -> list[Effect]:
        """Its subject names the instance: ``migrate.<instance>.move``."""
        tokens = message.subject.split(".")
        managed = self._managed.get(tokens[-2]) if len(tokens) > 1 else None
        if managed is None:
            return unexpected(message, "no instance of this migrator")
        return self._outgoing.begin(managed.instance, body, message.reply_to, now_ns)

    def _on_answer(self, correlation: str, body: Body | RequestFailure, traceparent: str, now_ns: int) -> list[Effect]:
        half, migration, number = correlation.split("/")
        if half == OUT:
            return self._outgoing.on_answer(migration, int(number), body, traceparent, now_ns)
        return self._replicas.on_answer(migration, int(number), body, now_ns)

    # time

    def _on_timer(self, fired: TimerFired, now_ns: int) -> list[Effect]:
        kind, _, about = fired.name.partition("/")
        if kind == REPLICA:
            return self._replicas.on_timer(about, now_ns)
        return [self._presence(now_ns), StartTimer.again(fired, now_ns, TICK_NS)] if kind == "tick" else []

    def _on_stop(self, now_ns: int) -> list[Effect]:
        effects = [*self._replicas.abandon(now_ns), *self._outgoing.abandon(now_ns)]
        self._outgoing.finished.clear()
        return [*effects, self._heartbeat.leaving(now_ns), Stop(reason="asked to stop")]

    def _presence(self, now_ns: int) -> Publish:
        under_way = sorted(self._outgoing, key=lambda out: out.started_ns)
        return self._heartbeat.presence(
            now_ns,
            moving=[row for managed in self._managed.values() if (row := self._moving(managed)) is not None],
            migrations=[out.status() for out in under_way[:TOLD_MAX]],
        )

    # for people and checkers

    def _moving(self, managed: ManagedInstance) -> InstanceMigrations | None:
        """Migrations from one instance; None where there are none."""
        counts = (len(self._outgoing.of(managed.instance)), self._replicas.held(managed.instance))
        return InstanceMigrations(managed.instance, *counts) if any(counts) else None

    def _counts(self) -> list[tuple[str, int, int, int]]:
        """For each instance: migrations under way, sequences that stand still, sequences with a replica."""
        rows = []
        for managed in self._managed.values():
            under_way = self._outgoing.of(managed.instance)
            frozen = sum(out.step is MigrationStep.COMMITTING for out in under_way)
            rows.append((managed.instance, len(under_way), frozen, self._replicas.held(managed.instance)))
        return rows

    def snapshot(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "instances": [managed.instance for managed in self._managed.values()],
            "out": {
                out.migration: [out.sequence, out.source, out.target, str(out.step), out.room.epoch]
                for out in self._outgoing
            },
            "replicas": {each.name: [each.sequence, each.holder, str(each.step), each.told] for each in self._replicas},
        }

    def check_invariants(self) -> None:
        self._outgoing.check()
        self._replicas.check()
