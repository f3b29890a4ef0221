"""The migrator: moves running sequences away from its instances.

Owns every migration from its instances and drives it: it asks the workers of both sides. It owns no sequence and no
block: a worker does, before and after, and ingress judges whose tokens count; so nothing is lost where a migrator dies,
and each deadline that matters is kept by a worker as well.

| message in | change | messages out |
|---|---|---|
| MigrateSequence | a migration is queued, or joined | LeaseKv; in the end MigrationFinished |
| EvacuateInstance | everything that runs there shall leave | EvacuationAnnounced; in the end InstanceEvacuated |
| Replied, RequestFailed (out/...) | the next step, see outgoing.py | AllotEpoch, PrepareMigration, PullKv, LeaseKv,
FreezeSequence, SubmitSequence, EndLease, UnreserveKv, MigrationFinished |
| StatusSnapshot | what may leave: evacuations, prefill instances; KV replicas | LeaseKv |
| Replied, RequestFailed (replica/...) | a replica's next step, see replicas.py | PrepareMigration, PullKv, LeaseKv,
EndLease, KvReplicated |
| InstanceSummary, KeyChanged, ServicePresence(worker) | who could take a sequence | |
| ServicePresence(broker) | its instances' initiator is quiet until the broker is silent | |
| TimerFired | rests, reservations without news, heartbeat | ServicePresence, next timer |
| StopRequested | everything is given up; nobody waits in vain | UnreserveKv, EndLease, ServicePresence, Stop |

Invariants: an instance has at most ``out_max`` migrations under way; a sequence moves once
at a time; what waits holds no lease; every MigrateSequence and EvacuateInstance is answered once.

Overload: beyond ``queued_max`` migrations are refused TOO_MANY. Each has a deadline at every step.
"""

from __future__ import annotations

from random import Random
from typing import Any

from millrace.actor.effects import Effect, Log, Publish, Reply, StartTimer, Stop, Subscribe, WatchKeys
from millrace.contracts.catalog import Role
from millrace.contracts.local import (
    BusReconnected,
    KeyChanged,
    Replied,
    RequestFailed,
    RequestFailure,
    StopRequested,
    TimerFired,
)
from millrace.contracts.message import Body, ErrorReply, Message
from millrace.contracts.migration import (
    EvacuateInstance,
    MigrateSequence,
)
from millrace.contracts.status import (
    InstanceMigrations,
    InstanceRecord,
    InstanceSummary,
    ServicePresence,
    StatusSnapshot,
)
from millrace.contracts.subjects import Subjects, subject_token
from millrace.membership import Heartbeat

from services.migrator.cluster_view import MigrationTargets
from services.migrator.config import MigratorConfig, target_policy
from services.migrator.context import MS, OUT, REPLICA, MigratorContext
from services.migrator.delegation import BROKER, Delegation
from services.migrator.evacuation import EVACUATION, FallbackInitiator
from services.migrator.initiator import Initiator
from services.migrator.metrics import MigratorMetrics
from services.migrator.outgoing import OutgoingMigrations
from services.migrator.replicas import Replicas
from services.migrator.state import ManagedInstance

#: Heartbeat, and how often what is over is forgotten.
TICK_NS = 1_000 * MS

#: Migrations told of with a heartbeat: one of a screen's height, and some 3 KB.
TOLD_MAX = 32

#: Wire types that a migrator takes.
ACCEPTS: tuple[type[Body], ...] = (
    EvacuateInstance,
    InstanceSummary,
    MigrateSequence,
    ServicePresence,
    StatusSnapshot,
)


class MigratorActor:
    """The migrator of one instance, or of those that share a worker process."""

    def __init__(self, *, config: MigratorConfig, incarnation: int, rng: Random, metrics: MigratorMetrics) -> None:
        """Raises ConfigError where the target policy is none. ``rng`` gives names of migrations and span ids."""
        self.name = config.name
        self._subjects = Subjects(config.bus.cluster)
        self._config = config
        self._limits = config.limits
        self._heartbeat = Heartbeat(
            subjects=self._subjects, role=Role.MIGRATOR, name=config.name, incarnation=incarnation
        )
        policy, parameters = target_policy(config.target)
        self._cluster_view = MigrationTargets(self._subjects, config.membership)
        self._delegation = Delegation(silence_ns=config.membership.broker_silence_ns)
        context = MigratorContext(
            config=config,
            subjects=self._subjects,
            rng=rng,
            cluster_view=self._cluster_view,
            metrics=metrics,
            policy=policy,
            parameters=parameters,
            delegation=self._delegation,
        )
        self._context = context
        self._outgoing = OutgoingMigrations(context)
        self._replicas = Replicas(context, self._outgoing)
        self._initiator: Initiator = FallbackInitiator(context, self._outgoing)
        self._managed = {subject_token(name): ManagedInstance(instance=name) for name in config.instances}
        self._heard_ns = 0
        metrics.in_flight, metrics.frozen, metrics.resting = self._gauges, self._frozen, self._resting
        metrics.replicas = self._replicated

    def start(self, now_ns: int) -> list[Effect]:
        """Listens to its instances' inboxes, watches who there is, begins to tick."""
        inboxes = [self._subjects.migrate(managed.instance, "*") for managed in self._managed.values()]
        return [
            WatchKeys(bucket="instance"),
            WatchKeys(bucket="plan"),
            *(Subscribe(subject=self._subjects.presence(Role.WORKER, each)) for each in self._managed),
            Subscribe(subject=self._subjects.presences(BROKER)),
            *(Subscribe(subject=subject) for subject in inboxes),
            *self._on_tick(now_ns),
        ]

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        """See the table above."""
        self._heard_ns = now_ns
        effects = self._dispatch(message, now_ns)
        while self._outgoing.finished:  # what has ended makes room for what waits
            effects += self._after_finished(now_ns)
        return [*self._replicas.make_way(now_ns), *effects]

    def _dispatch(self, message: Message, now_ns: int) -> list[Effect]:
        match message.body:
            case Replied(correlation=correlation, body=body):
                return self._on_answer(correlation, body, message.traceparent, now_ns)
            case RequestFailed(correlation=correlation, reason=reason):
                return self._on_answer(correlation, reason, "", now_ns)
            case InstanceSummary() as body:
                self._cluster_view.on_summary(body, now_ns)
                self._context.pairs.on_summary(body)
                return []
            case StatusSnapshot() as body:
                managed = self._managed.get(subject_token(body.instance)) if body.instance else None
                if managed is None:
                    return []
                return self._initiator.on_snapshot(managed, body, now_ns) + self._replicas.on_snapshot(
                    managed, body, now_ns
                )
            case KeyChanged() as body:
                self._cluster_view.on_key(body, now_ns)
                return self._listen(now_ns) if body.bucket == "plan" else self._on_record(body.value)
            case ServicePresence() as body:
                self._cluster_view.on_presence(body)
                self._delegation.on_presence(body, set(self._config.instances), now_ns)
                return []
            case BusReconnected():
                self._delegation.restart_timers(now_ns)
                return []
            case TimerFired(name=name):
                return self._on_timer(name, now_ns)
            case StopRequested():
                return self._on_stop(now_ns)
            case _:
                return self._on_asked(message, now_ns)

    def _on_record(self, record: Any) -> list[Effect]:
        """Says once where a worker of ours lets its sequences stand still for less than we are set to ask."""
        kv = record.kv if isinstance(record, InstanceRecord) else None
        managed = self._managed.get(subject_token(record.instance)) if kv is not None else None
        if kv is None or managed is None or kv.freeze_ms_max == managed.freeze_ms_max:
            return []
        managed.freeze_ms_max = kv.freeze_ms_max
        limits = self._limits
        if not kv.freeze_ms_max or max(limits.freeze_ms, limits.copy_freeze_ms) <= kv.freeze_ms_max:
            return []
        fields = {name: getattr(limits, name) for name in ("copy_freeze_ms", "freeze_ms")}
        fields |= {"instance": managed.instance, "freeze_ms_max": kv.freeze_ms_max}
        return [Log(level="warning", event="freezes_shortened", fields=fields)]

    def _on_asked(self, message: Message, now_ns: int) -> list[Effect]:
        """Handle a message about one instance, which its subject names: ``migrate.<instance>.<verb>``."""
        tokens = message.subject.split(".")
        managed = self._managed.get(tokens[-2]) if len(tokens) > 1 else None
        match message.body:
            case _ if managed is None:
                return _unexpected(message, "no instance of this migrator")
            case MigrateSequence() as body:
                if body.order:
                    self._initiator.ordered(managed, now_ns)
                return self._outgoing.ask_for(managed.instance, body, message.reply_to, now_ns)
            case EvacuateInstance() as body:
                return self._initiator.evacuate(managed, body, message.reply_to, now_ns)
            case _:
                return _unexpected(message, f"a migrator does not take {type(message.body).__name__}")

    def _on_answer(self, correlation: str, body: Body | RequestFailure, traceparent: str, now_ns: int) -> list[Effect]:
        half, migration, number = correlation.split("/")
        if half == OUT:
            return self._outgoing.on_answer(migration, int(number), body, traceparent, now_ns)
        return self._replicas.on_answer(migration, int(number), body, now_ns)

    def _after_finished(self, now_ns: int) -> list[Effect]:
        """Tells of it, and begins what leaves by itself."""
        effects: list[Effect] = []
        ended, self._outgoing.finished = self._outgoing.finished, []
        for body in ended:
            managed = self._managed[subject_token(body.source)]
            effects += self._initiator.on_finished(managed, body, now_ns)
            effects += self._replicas.on_finished(body, now_ns)
            effects += self._initiator.resume(managed, now_ns)
        return effects

    # time

    def _on_timer(self, name: str, now_ns: int) -> list[Effect]:
        kind, _, about = name.partition("/")
        match kind:
            case "tick":
                return self._on_tick(now_ns)
            case _ if kind == OUT:
                return self._outgoing.on_timer(about, now_ns)
            case _ if kind == REPLICA:
                return self._replicas.on_timer(about, now_ns)
            case _ if kind == EVACUATION:
                return self._initiator.resume(self._managed[subject_token(about)], now_ns)
            case _:
                return []

    def _on_tick(self, now_ns: int) -> list[Effect]:
        timer = StartTimer(name="tick", at_ns=now_ns + TICK_NS)
        listening = [*self._listen(now_ns), *self._cluster_view.tick(now_ns)]
        return [self._presence(now_ns), timer, *listening]

    def _listen(self, now_ns: int) -> list[Effect]:
        parts = (self._initiator, self._replicas)
        return [e for managed in self._managed.values() for part in parts for e in part.subscriptions(managed, now_ns)]

    def _on_stop(self, now_ns: int) -> list[Effect]:
        effects = [*self._replicas.abandon(now_ns), *self._outgoing.abandon(now_ns)]
        self._outgoing.finished.clear()
        for managed in self._managed.values():
            effects += self._initiator.abandon(managed, now_ns)
        return [*effects, self._heartbeat.leaving(now_ns), Stop(reason="asked to stop")]

    def _presence(self, now_ns: int) -> Publish:
        under_way = sorted((out for out in self._outgoing if out.busy), key=lambda out: out.started_ns)
        return self._heartbeat.presence(
            now_ns,
            moving=[row for managed in self._managed.values() if (row := self._moving(managed, now_ns)) is not None],
            migrations=[out.status() for out in under_way[:TOLD_MAX]],
        )

    # for people and checkers

    def _moving(self, managed: ManagedInstance, now_ns: int) -> InstanceMigrations | None:
        """Migrations from one instance; None where there are none."""
        name, leaving = managed.instance, self._outgoing.busy(managed.instance)
        waiting = len(self._outgoing.of(name)) - leaving + managed.backoff.resting(now_ns)
        counts = (leaving, waiting, self._replicas.held(name))
        return InstanceMigrations(name, *counts) if any(counts) else None

    def _replicated(self) -> list[tuple[str, int]]:
        return [(managed.instance, self._replicas.held(managed.instance)) for managed in self._managed.values()]

    def _gauges(self) -> list[tuple[str, str, int]]:
        rows: list[tuple[str, str, int]] = []
        for managed in self._managed.values():
            out = self._outgoing.busy(managed.instance)
            rows.append((managed.instance, "out", out))
            rows.append((managed.instance, "queued", len(self._outgoing.of(managed.instance)) - out))
        return rows

    def _frozen(self) -> list[tuple[str, int]]:
        return [
            (managed.instance, sum(out.stands_still for out in self._outgoing.of(managed.instance)))
            for managed in self._managed.values()
        ]

    def _resting(self) -> list[tuple[str, int]]:
        return [(managed.instance, managed.backoff.resting(self._heard_ns)) for managed in self._managed.values()]

    def snapshot(self) -> dict[str, Any]:
        """State for people and checkers."""
        return {
            "name": self.name,
            "instances": [managed.instance for managed in self._managed.values()],
            "out": {
                out.migration: [out.sequence, out.source, out.target or out.wanted, str(out.step), out.target_epoch]
                for out in self._outgoing
            },
            "replicas": {each.name: [each.sequence, each.holder, str(each.step), each.told] for each in self._replicas},
            "evacuations": [managed.instance for managed in self._managed.values() if managed.evacuation is not None],
            **self._cluster_view.plain(),
        }

    def check_invariants(self) -> None:
        """Raises AssertionError where the state contradicts itself."""
        self._outgoing.check()
        self._replicas.check()


def _unexpected(message: Message, detail: str) -> list[Effect]:
    body = ErrorReply(reason="unexpected", detail=detail)
    return [Reply(to=message.reply_to, body=body)] if message.reply_to else []
