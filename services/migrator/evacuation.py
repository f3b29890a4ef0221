"""The built-in initiator: evacuations, and hand-offs of prefill instances.

It starts migrations only for instances without a broker. Where a broker acts, an evacuation is announced to it and is
its to carry out; this module follows it and answers who asked. A broker that orders no move for a while, because it is
set to drain nothing or knows no target, leaves the evacuation to this module.
"""

from __future__ import annotations

from millrace.actor.effects import Effect, Log, Publish, Reply, StartTimer
from millrace.contracts.broker import EvacuationAnnounced
from millrace.contracts.kv import KvRefusal
from millrace.contracts.migration import (
    EvacuateInstance,
    InstanceEvacuated,
    MigrateSequence,
    MigrationFinished,
    MigrationOutcome,
    MigrationReason,
)
from millrace.contracts.plan import InstanceRole
from millrace.contracts.status import SequenceStatus, StatusSnapshot
from millrace.policies.migration.backoff import NOBODY, RefusedMove
from millrace.policies.migration.leaving import LeavingQuestion, leaving, longest_rest_first

from services.migrator import messages
from services.migrator.context import MS, MigratorContext
from services.migrator.outgoing import OutgoingMigrations
from services.migrator.state import Evacuation, ManagedInstance

#: Failures of one sequence within one evacuation before it is left alone.
ATTEMPTS_MAX = 5

#: What time alone may change: room comes when others end. These are no failures of the sequence.
PATIENCE = frozenset({KvRefusal.NO_TARGET, KvRefusal.NO_BLOCKS, KvRefusal.TOO_MANY, KvRefusal.NOT_RUNNING})

#: How often an evacuation is looked at where nothing happens.
LOOK_NS = 200 * MS

#: How often the broker is told of an evacuation that goes on: an announcement may be lost, a broker started anew.
ANNOUNCE_NS = 500 * MS

#: Its timers: ``evacuation/<instance>``.
EVACUATION = "evacuation"

#: An evacuation begins from a snapshot not older than itself; where none comes in this time, from the last one.
SNAPSHOT_NS = 600 * MS


class FallbackInitiator:
    """Starts migrations from the snapshots of our instances. Implements ``Initiator``."""

    def __init__(self, context: MigratorContext, outgoing: OutgoingMigrations) -> None:
        self._context = context
        self._outgoing = outgoing

    def on_snapshot(self, managed: ManagedInstance, body: StatusSnapshot, now_ns: int) -> list[Effect]:
        """The instance's sequences now."""
        managed.snapshot, managed.heard_ns = body, now_ns
        return [*self._look(managed, now_ns), *self.resume(managed, now_ns)]

    def _look(self, managed: ManagedInstance, now_ns: int) -> list[Effect]:
        """Whether what was refused may be tried again."""
        back = managed.backoff
        if back.rests or back.pause is not None:
            present = {status.sequence for status in managed.sequences()}
            shown = self._context.cluster_view.shown(managed.instance, now_ns)
            self._context.metrics.handoff_pauses_cut += back.look(present, shown, now_ns)
        trouble = back.over(now_ns)
        if trouble is None:
            return []
        fields = {"instance": managed.instance, "refused": trouble.refused}
        fields |= {"lasted_s": round((trouble.last_ns - trouble.since_ns) / 1e9, 1)}
        return [Log(level="info", event="handoffs_resumed", fields=fields)]

    def _rooms(self, managed: ManagedInstance, now_ns: int) -> list[int]:
        """Blocks of the largest sequence that each other instance could take; the most first."""
        growth = self._context.limits.growth_blocks
        return [idle - growth for idle in self._context.cluster_view.rooms(managed.instance, now_ns)]

    def evacuate(self, managed: ManagedInstance, body: EvacuateInstance, reply_to: str, now_ns: int) -> list[Effect]:
        """Everything shall leave; a second one joins the first."""
        until_ns = now_ns + max(0, body.limit_ms) * MS
        if managed.evacuation is None:
            managed.backoff.forget()
            managed.evacuation = Evacuation(ask=body, since_ns=now_ns, until_ns=until_ns, waiters=[], ordered_ns=now_ns)
        managed.evacuation.until_ns = max(managed.evacuation.until_ns, until_ns)
        managed.evacuation.waiters += [reply_to] if reply_to else []
        return [*self.subscriptions(managed, now_ns), *self.resume(managed, now_ns)]

    def subscriptions(self, managed: ManagedInstance, now_ns: int) -> list[Effect]:
        """Subscribe to snapshots and summaries as long as something leaves from here without an order."""
        record = self._context.cluster_view.record(managed.instance)
        if record is None or not (managed.evacuation is not None or self._hands_off(managed, now_ns)):
            return []
        view = self._context.cluster_view
        return view.listen_to_status(managed.instance, now_ns) + view.listen_to_model(record.model, now_ns)

    def _hands_off(self, managed: ManagedInstance, now_ns: int) -> bool:
        prefills = self._context.cluster_view.role(managed.instance) is InstanceRole.PREFILL
        return prefills and not self._has_broker(managed, now_ns)

    def _has_broker(self, managed: ManagedInstance, now_ns: int) -> bool:
        return self._context.delegation.broker_of(managed.instance, now_ns) is not None

    def resume(self, managed: ManagedInstance, now_ns: int) -> list[Effect]:
        """Begins what may begin, and ends an evacuation that has nothing left to do."""
        if managed.evacuation is not None:
            announced = self._announce(managed, managed.evacuation, now_ns)
            return announced + self._begin(managed, now_ns) + self._end_if_done(managed, managed.evacuation, now_ns)
        return self._begin(managed, now_ns) if self._hands_off(managed, now_ns) else []

    def ordered(self, managed: ManagedInstance, now_ns: int) -> None:
        """Its broker has ordered a move."""
        if managed.evacuation is not None:
            managed.evacuation.ordered_ns = now_ns

    def _is_idle(self, managed: ManagedInstance, now_ns: int) -> bool:
        """Whether the broker has let an evacuation rest for as long as one that is silent."""
        evacuation, silence_ns = managed.evacuation, self._context.config.membership.broker_silence_ns
        if evacuation is None or any(out.orders for out in self._outgoing.of(managed.instance)):
            return False
        return now_ns - evacuation.ordered_ns >= silence_ns

    def _announce(self, managed: ManagedInstance, evacuation: Evacuation, now_ns: int) -> list[Effect]:
        if now_ns - evacuation.announced_ns < ANNOUNCE_NS or not self._has_broker(managed, now_ns):
            return []
        evacuation.announced_ns = now_ns
        return [self._announcement(managed, left_ms=max(0, evacuation.until_ns - now_ns) // MS)]

    def _announcement(self, managed: ManagedInstance, *, left_ms: int) -> Effect:
        body = EvacuationAnnounced(instance=managed.instance, left_ms=left_ms)
        return Publish(subject=self._context.subjects.evacuation(managed.instance), body=body)

    def _begin(self, managed: ManagedInstance, now_ns: int) -> list[Effect]:
        if self._has_broker(managed, now_ns) and not self._is_idle(managed, now_ns):
            return []
        reason = managed.evacuation.ask.reason if managed.evacuation is not None else MigrationReason.HANDOFF
        effects: list[Effect] = []
        for status in self._leaving(managed, now_ns):
            wish = MigrateSequence(sequence=status.sequence, reason=reason, within_ms=0)
            effects += self._outgoing.ask_for(managed.instance, wish, "", now_ns)
        return effects

    def _free(self, managed: ManagedInstance, now_ns: int) -> int:
        """Number of further sequences that may leave now."""
        out_max = self._context.limits.out_max
        allowed = out_max if managed.evacuation is not None else managed.backoff.free(out_max, now_ns)
        return max(0, allowed - len(self._outgoing.of(managed.instance)))

    def _leaving(self, managed: ManagedInstance, now_ns: int) -> list[SequenceStatus]:
        """As many as find room side by side. Where nobody has room its engine is not even asked for a lease; the next
        snapshot asks again.
        """
        count = self._free(managed, now_ns)
        barred = self._barred(managed, now_ns) if count else set()
        if not count or all(status.sequence in barred for status in managed.sequences()):
            return []
        sequences = managed.sequences()
        question = LeavingQuestion(
            sequences=longest_rest_first(sequences) if managed.evacuation is not None else tuple(sequences),
            barred=barred,
            rooms=tuple(self._rooms(managed, now_ns)),
            growth_blocks=self._context.limits.growth_blocks,
            count=count,
        )
        return leaving(question)

    def _barred(self, managed: ManagedInstance, now_ns: int) -> set[str]:
        """Sequences that move already, rest after a refusal, or have failed too often."""
        barred = self._outgoing.moving(managed.instance) | managed.backoff.all_resting(now_ns)
        attempts = managed.evacuation.attempts if managed.evacuation is not None else {}
        return barred | {sequence for sequence, failures in attempts.items() if failures >= ATTEMPTS_MAX}

    def _may_leave(self, managed: ManagedInstance, status: SequenceStatus) -> bool:
        attempts = managed.evacuation.attempts.get(status.sequence, 0) if managed.evacuation is not None else 0
        return not status.immovable and attempts < ATTEMPTS_MAX

    def on_finished(self, managed: ManagedInstance, body: MigrationFinished, now_ns: int) -> list[Effect]:
        """A migration from here ended. Says so, but for handoffs that nobody took: those are told of together."""
        moved = body.outcome is MigrationOutcome.MOVED
        refused_handoff = body.reason is MigrationReason.HANDOFF and not moved and body.refusal in NOBODY
        if moved:
            managed.backoff.moved(body.sequence, now_ns)
        elif refused_handoff and managed.evacuation is None:
            return self._back_off(managed, body, now_ns)
        else:
            managed.backoff.leave(body.sequence, now_ns)
        if managed.evacuation is not None:
            managed.evacuation.moved += moved
            managed.evacuation.failed += not moved
            if body.orders:
                managed.evacuation.ordered_ns = now_ns
            if not moved and body.refusal not in PATIENCE:
                attempts = managed.evacuation.attempts
                attempts[body.sequence] = attempts.get(body.sequence, 0) + 1
            self._context.metrics.evacuated["moved" if moved else "failed"] += 1
        return [messages.finished_line(body)]

    def _back_off(self, managed: ManagedInstance, body: MigrationFinished, now_ns: int) -> list[Effect]:
        """Less often from now on; the first refusal after a quiet time is told."""
        assert body.refusal is not None
        need = next((status.blocks for status in managed.sequences() if status.sequence == body.sequence), 1)
        room = self._context.cluster_view.shown(managed.instance, now_ns)
        refused = RefusedMove(sequence=body.sequence, reason=body.refusal, need=max(1, need), room=room)
        if managed.backoff.refused(refused, self._context.rng, now_ns):
            self._context.metrics.handoff_pauses[str(body.refusal)] += 1
        if not managed.backoff.note(now_ns):
            return []
        fields = {
            "instance": managed.instance,
            "target": body.target,
            "refusal": str(body.refusal),
            "detail": body.detail,
        }
        return [Log(level="info", event="handoffs_refused", fields=fields)]

    def _end_if_done(self, managed: ManagedInstance, evacuation: Evacuation, now_ns: int) -> list[Effect]:
        moving = self._outgoing.moving(managed.instance)
        if now_ns < evacuation.until_ns and (moving or not self._is_done(managed, evacuation, now_ns)):
            again_ns = min(evacuation.until_ns, now_ns + LOOK_NS)
            return [StartTimer(name=f"{EVACUATION}/{managed.instance}", at_ns=again_ns)]
        return self._end(managed, evacuation, now_ns)

    def abandon(self, managed: ManagedInstance, now_ns: int) -> list[Effect]:
        """This process ends: an evacuation is over, however far it came."""
        return self._end(managed, managed.evacuation, now_ns) if managed.evacuation is not None else []

    def _end(self, managed: ManagedInstance, evacuation: Evacuation, now_ns: int) -> list[Effect]:
        managed.evacuation = None
        answer = InstanceEvacuated(
            instance=managed.instance,
            moved=evacuation.moved,
            failed=evacuation.failed,
            left=len(_still_there(managed, now_ns)),
        )
        over = [self._announcement(managed, left_ms=0)] if evacuation.announced_ns else []
        return [*over, *(Reply(to=to, body=answer) for to in evacuation.waiters)]

    def _is_done(self, managed: ManagedInstance, evacuation: Evacuation, now_ns: int) -> bool:
        if not self._context.cluster_view.has_others(managed.instance):
            return True  # there is nowhere to go
        if managed.heard_ns <= evacuation.since_ns:
            return now_ns - evacuation.since_ns >= SNAPSHOT_NS
        return not any(self._may_leave(managed, status) for status in _still_there(managed, now_ns))


def _still_there(managed: ManagedInstance, now_ns: int) -> list[SequenceStatus]:
    """Sequences of the last snapshot but for those that moved so lately that it may be older than that."""
    return [status for status in managed.sequences() if not managed.backoff.has_moved(status.sequence, now_ns)]
