"""The migrator: moves running sequences away from its instances, and takes those that come.

Owns every migration from and to its instances, on its side: the source's migrator drives, the target's answers. It
owns no sequence and no block: a worker does, before and after, and ingress judges whose tokens count; so nothing is
lost where a migrator dies, and each deadline that matters is kept by a worker as well.

| message in | change | messages out |
|---|---|---|
| MigrateSequence | a migration is queued, or joined | LeaseKv; in the end MigrationFinished |
| EvacuateInstance | everything that runs there shall leave | in the end InstanceEvacuated |
| Replied, RequestFailed (out/...) | the next step, see departures.py | AllotEpoch, PrepareMigration, PullBlocks,
LeaseKv, FreezeSequence, CommitMigration, EndLease, AbortMigration, MigrationFinished |
| PrepareMigration, PullBlocks, CommitMigration | see arrivals.py | ReserveKv, PullKv, SubmitSequence |
| Replied, RequestFailed (into/...) | the worker's answer | MigrationPrepared, BlocksPulled, MigrationCommitted,
MigrationRefused, UnreserveKv |
| AbortMigration | over, unless it is being committed | UnreserveKv |
| StatusSnapshot | what may leave: evacuations, prefill instances | LeaseKv |
| InstanceSummary, KeyChanged, ServicePresence | who could take a sequence | |
| TimerFired | rests, reservations without news, heartbeat | ServicePresence, next timer |
| StopRequested | everything is given up; nobody waits in vain | AbortMigration, EndLease, ServicePresence, Stop |

Invariants: an instance has at most ``out_max`` migrations away and ``in_max`` to it under way; a sequence moves once
at a time; what waits holds no lease; every MigrateSequence and EvacuateInstance is answered once.

Overload: beyond ``queued_max`` migrations are refused TOO_MANY, as are those to an instance beyond ``in_max``. Each
has a deadline at every step.
"""

from __future__ import annotations

from random import Random
from typing import Any

from millrace.actor.effects import Effect, Log, Publish, Reply, StartTimer, Stop, Subscribe, WatchKeys
from millrace.contracts.catalog import Role
from millrace.contracts.local import KeyChanged, Replied, RequestFailed, RequestFailure, StopRequested, TimerFired
from millrace.contracts.message import Body, ErrorReply, Message
from millrace.contracts.migration import (
    AbortMigration,
    CommitMigration,
    EvacuateInstance,
    MigrateSequence,
    PrepareMigration,
    PullBlocks,
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

from services.migrator.arrivals import Arrivals
from services.migrator.clearing import EVACUATION, Clearing
from services.migrator.config import MigratorConfig, target_policy
from services.migrator.departures import Departures
from services.migrator.desk import INTO, MS, OUT, Desk
from services.migrator.metrics import MigratorMetrics
from services.migrator.state import Post
from services.migrator.surroundings import Surroundings

#: Heartbeat, and how often what is over is forgotten.
TICK_NS = 1_000 * MS

#: Migrations told of with a heartbeat: one of a screen's height, and some 3 KB.
TOLD_MAX = 32

#: Wire types that a migrator takes.
ACCEPTS: tuple[type[Body], ...] = (
    AbortMigration,
    CommitMigration,
    EvacuateInstance,
    InstanceSummary,
    MigrateSequence,
    PrepareMigration,
    PullBlocks,
    ServicePresence,
    StatusSnapshot,
)


class MigratorActor:
    """The migrator of one instance, or of those that share a worker process."""

    def __init__(self, *, config: MigratorConfig, incarnation: int, rng: Random, metrics: MigratorMetrics) -> None:
        """Raises ConfigError where the target policy is none. ``rng`` gives names of migrations and span ids."""
        self.name = config.name
        self._subjects = Subjects(config.bus.cluster)
        self._limits = config.limits
        self._heartbeat = Heartbeat(
            subjects=self._subjects, role=Role.MIGRATOR, name=config.name, incarnation=incarnation
        )
        policy, parameters = target_policy(config.target)
        self._surroundings = Surroundings(self._subjects, config.membership)
        desk = Desk(config, self._subjects, rng, self._surroundings, metrics, policy, parameters)
        self._departures = Departures(desk)
        self._arrivals = Arrivals(desk)
        self._clearing = Clearing(desk, self._departures)
        self._posts = {subject_token(name): Post(instance=name) for name in config.instances}
        self._heard_ns = 0
        metrics.in_flight, metrics.frozen, metrics.resting = self._gauges, self._frozen, self._resting

    def start(self, now_ns: int) -> list[Effect]:
        """Listens to its instances' inboxes, watches who there is, begins to tick."""
        inboxes = [self._subjects.migrate(post.instance, "*") for post in self._posts.values()]
        return [
            WatchKeys(bucket="instance"),
            WatchKeys(bucket="plan"),
            Subscribe(subject=self._subjects.presences(Role.WORKER)),
            *(Subscribe(subject=subject) for subject in inboxes),
            *self._on_tick(now_ns),
        ]

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        """See the table above."""
        self._heard_ns = now_ns
        effects = self._dispatch(message, now_ns)
        while self._departures.finished:  # what has ended makes room for what waits
            effects += self._after_finished(now_ns)
        return effects

    def _dispatch(self, message: Message, now_ns: int) -> list[Effect]:
        match message.body:
            case Replied(correlation=correlation, body=body):
                return self._on_answer(correlation, body, message.traceparent, now_ns)
            case RequestFailed(correlation=correlation, reason=reason):
                return self._on_answer(correlation, reason, "", now_ns)
            case InstanceSummary() as body:
                self._surroundings.on_summary(body, now_ns)
                return []
            case StatusSnapshot() as body:
                post = self._posts.get(subject_token(body.instance)) if body.instance else None
                return self._clearing.on_snapshot(post, body, now_ns) if post is not None else []
            case KeyChanged() as body:
                self._surroundings.on_key(body, now_ns)
                return self._listen(now_ns) if body.bucket == "plan" else self._on_record(body.value)
            case ServicePresence() as body:
                self._surroundings.on_presence(body)
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
        post = self._posts.get(subject_token(record.instance)) if kv is not None else None
        if kv is None or post is None or kv.freeze_ms_max == post.freeze_ms_max:
            return []
        post.freeze_ms_max = kv.freeze_ms_max
        limits = self._limits
        if not kv.freeze_ms_max or max(limits.freeze_ms, limits.copy_freeze_ms) <= kv.freeze_ms_max:
            return []
        fields = {name: getattr(limits, name) for name in ("copy_freeze_ms", "freeze_ms")}
        fields |= {"instance": post.instance, "freeze_ms_max": kv.freeze_ms_max}
        return [Log(level="warning", event="freezes_shortened", fields=fields)]

    def _on_asked(self, message: Message, now_ns: int) -> list[Effect]:
        """What concerns one instance, by the subject that it came on: ``migrate.<instance>.<verb>``."""
        tokens = message.subject.split(".")
        post = self._posts.get(tokens[-2]) if len(tokens) > 1 else None
        match message.body:
            case _ if post is None:
                return _unexpected(message, "no instance of this migrator")
            case MigrateSequence() as body:
                return self._departures.ask_for(post.instance, body, message.reply_to, now_ns)
            case EvacuateInstance() as body:
                return self._clearing.evacuate(post, body, message.reply_to, now_ns)
            case PrepareMigration() as body:
                return self._arrivals.on_prepare(post.instance, body, message, now_ns)
            case PullBlocks() as body:
                return self._arrivals.on_pull(body, message, now_ns)
            case CommitMigration() as body:
                return self._arrivals.on_commit(body, message, now_ns)
            case AbortMigration() as body:
                return self._arrivals.on_abort(body, now_ns)
            case _:
                return _unexpected(message, f"a migrator does not take {type(message.body).__name__}")

    def _on_answer(self, correlation: str, body: Body | RequestFailure, traceparent: str, now_ns: int) -> list[Effect]:
        half, migration, number = correlation.split("/")
        if half == OUT:
            return self._departures.on_answer(migration, int(number), body, traceparent, now_ns)
        return self._arrivals.on_answer(migration, int(number), body, now_ns)

    def _after_finished(self, now_ns: int) -> list[Effect]:
        """Tells of it, and begins what leaves by itself."""
        effects: list[Effect] = []
        ended, self._departures.finished = self._departures.finished, []
        for body in ended:
            post = self._posts[subject_token(body.source)]
            effects += self._clearing.on_finished(post, body, now_ns)
            effects += self._clearing.go_on(post, now_ns)
        return effects

    # time

    def _on_timer(self, name: str, now_ns: int) -> list[Effect]:
        kind, _, about = name.partition("/")
        match kind:
            case "tick":
                return self._on_tick(now_ns)
            case _ if kind == OUT:
                return self._departures.on_timer(about, now_ns)
            case _ if kind == INTO:
                return self._arrivals.on_timer(about, now_ns)
            case _ if kind == EVACUATION:
                return self._clearing.go_on(self._posts[subject_token(about)], now_ns)
            case _:
                return []

    def _on_tick(self, now_ns: int) -> list[Effect]:
        self._arrivals.tick(now_ns)
        timer = StartTimer(name="tick", at_ns=now_ns + TICK_NS)
        listening = [*self._listen(now_ns), *self._surroundings.tick(now_ns)]
        return [self._presence(now_ns), timer, *listening]

    def _listen(self, now_ns: int) -> list[Effect]:
        return [effect for post in self._posts.values() for effect in self._clearing.listen(post, now_ns)]

    def _on_stop(self, now_ns: int) -> list[Effect]:
        effects = [*self._departures.abandon(now_ns), *self._arrivals.abandon(now_ns)]
        self._departures.finished.clear()
        for post in self._posts.values():
            effects += self._clearing.abandon(post, now_ns)
        return [*effects, self._heartbeat.leaving(now_ns), Stop(reason="asked to stop")]

    def _presence(self, now_ns: int) -> Publish:
        under_way = sorted((out for out in self._departures if out.busy), key=lambda out: out.started_ns)
        return self._heartbeat.presence(
            now_ns,
            moving=[row for post in self._posts.values() if (row := self._moving(post, now_ns)) is not None],
            migrations=[out.status() for out in under_way[:TOLD_MAX]],
        )

    # for people and checkers

    def _moving(self, post: Post, now_ns: int) -> InstanceMigrations | None:
        """What moves from and to one instance; None where nothing does."""
        name, leaving = post.instance, self._departures.busy(post.instance)
        waiting = len(self._departures.of(name)) - leaving + post.backoff.resting(now_ns)
        counts = (leaving, self._arrivals.busy(name), waiting)
        return InstanceMigrations(name, *counts) if any(counts) else None

    def _gauges(self) -> list[tuple[str, str, int]]:
        rows: list[tuple[str, str, int]] = []
        for post in self._posts.values():
            out = self._departures.busy(post.instance)
            rows.append((post.instance, "out", out))
            rows.append((post.instance, "in", self._arrivals.busy(post.instance)))
            rows.append((post.instance, "queued", len(self._departures.of(post.instance)) - out))
        return rows

    def _frozen(self) -> list[tuple[str, int]]:
        return [
            (post.instance, sum(out.stands_still for out in self._departures.of(post.instance)))
            for post in self._posts.values()
        ]

    def _resting(self) -> list[tuple[str, int]]:
        return [(post.instance, post.backoff.resting(self._heard_ns)) for post in self._posts.values()]

    def snapshot(self) -> dict[str, Any]:
        """State for people and checkers."""
        return {
            "name": self.name,
            "instances": [post.instance for post in self._posts.values()],
            "out": {
                out.migration: [out.sequence, out.source, out.target or out.wanted, str(out.step), out.target_epoch]
                for out in self._departures
            },
            "in": {into.migration: [into.sequence, into.instance, str(into.stage)] for into in self._arrivals},
            "evacuations": [post.instance for post in self._posts.values() if post.evacuation is not None],
            **self._surroundings.plain(),
        }

    def check_invariants(self) -> None:
        """Raises AssertionError where the state contradicts itself."""
        self._departures.check()
        self._arrivals.check()


def _unexpected(message: Message, detail: str) -> list[Effect]:
    body = ErrorReply(reason="unexpected", detail=detail)
    return [Reply(to=message.reply_to, body=body)] if message.reply_to else []
