"""Which sequences leave an instance without anybody naming them: evacuations, and handoffs of prefill instances."""

from __future__ import annotations

from millrace.actor.effects import Effect, Log, Reply, StartTimer
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
from millrace.contracts.status import SequenceState, SequenceStatus, StatusSnapshot

from services.migrator import wording
from services.migrator.backoff import NOBODY, Refused
from services.migrator.departures import Departures
from services.migrator.desk import MS, Desk
from services.migrator.state import Evacuation, Post

#: Failures of one sequence within one evacuation before it is left alone.
ATTEMPTS_MAX = 5

#: What time alone may change: room comes when others end. These are no failures of the sequence.
PATIENCE = frozenset({KvRefusal.NO_TARGET, KvRefusal.NO_BLOCKS, KvRefusal.TOO_MANY, KvRefusal.NOT_RUNNING})

#: How often an evacuation is looked at where nothing happens.
LOOK_NS = 200 * MS

#: Its timers: ``evacuation/<instance>``.
EVACUATION = "evacuation"

#: An evacuation begins from a snapshot not older than itself; where none comes in this time, from the last one.
SNAPSHOT_NS = 600 * MS


class Clearing:
    """Starts migrations from the snapshots of our instances."""

    def __init__(self, desk: Desk, departures: Departures) -> None:
        self._desk = desk
        self._departures = departures

    def on_snapshot(self, post: Post, body: StatusSnapshot, now_ns: int) -> list[Effect]:
        """The instance's sequences now."""
        post.snapshot, post.heard_ns = body, now_ns
        return [*self._look(post, now_ns), *self.go_on(post, now_ns)]

    def _look(self, post: Post, now_ns: int) -> list[Effect]:
        """Whether what was refused may be tried again."""
        back = post.backoff
        if back.rests or back.pause is not None:
            present = {status.sequence for status in post.sequences()}
            shown = self._desk.surroundings.shown(post.instance, now_ns)
            self._desk.metrics.handoff_pauses_cut += back.look(present, shown, now_ns)
        trouble = back.over(now_ns)
        if trouble is None:
            return []
        fields = {"instance": post.instance, "refused": trouble.refused}
        fields |= {"lasted_s": round((trouble.last_ns - trouble.since_ns) / 1e9, 1)}
        return [Log(level="info", event="handoffs_taken_again", fields=fields)]

    def _rooms(self, post: Post, now_ns: int) -> list[int]:
        """Blocks of the largest sequence that each other instance could take; the most first."""
        growth = self._desk.limits.growth_blocks
        return [idle - growth for idle in self._desk.surroundings.rooms(post.instance, now_ns)]

    def evacuate(self, post: Post, body: EvacuateInstance, reply_to: str, now_ns: int) -> list[Effect]:
        """Everything shall leave; a second one joins the first."""
        until_ns = now_ns + max(0, body.limit_ms) * MS
        if post.evacuation is None:
            post.backoff.forget()
            post.evacuation = Evacuation(ask=body, since_ns=now_ns, until_ns=until_ns, waiters=[])
        post.evacuation.until_ns = max(post.evacuation.until_ns, until_ns)
        post.evacuation.waiters += [reply_to] if reply_to else []
        return [*self.listen(post, now_ns), *self.go_on(post, now_ns)]

    def listen(self, post: Post, now_ns: int) -> list[Effect]:
        """Snapshots and summaries are wanted as long as something leaves from here by itself."""
        record = self._desk.surroundings.record(post.instance)
        if record is None or not (post.evacuation is not None or self._hands_off(post)):
            return []
        around = self._desk.surroundings
        return around.listen_to_status(post.instance, now_ns) + around.listen_to_model(record.model, now_ns)

    def _hands_off(self, post: Post) -> bool:
        return self._desk.surroundings.role(post.instance) is InstanceRole.PREFILL

    def go_on(self, post: Post, now_ns: int) -> list[Effect]:
        """Begins what may begin, and ends an evacuation that has nothing left to do."""
        if post.evacuation is not None:
            return self._begin(post, now_ns) + self._end_if_done(post, post.evacuation, now_ns)
        return self._begin(post, now_ns) if self._hands_off(post) else []

    def _begin(self, post: Post, now_ns: int) -> list[Effect]:
        reason = post.evacuation.ask.reason if post.evacuation is not None else MigrationReason.HANDOFF
        effects: list[Effect] = []
        for status in self._roomy(post, self._free(post, now_ns), now_ns):
            wish = MigrateSequence(sequence=status.sequence, reason=reason, within_ms=0)
            effects += self._departures.ask_for(post.instance, wish, "", now_ns)
        return effects

    def _free(self, post: Post, now_ns: int) -> int:
        """How many more may leave now."""
        out_max = self._desk.limits.out_max
        allowed = out_max if post.evacuation is not None else post.backoff.free(out_max, now_ns)
        return max(0, allowed - len(self._departures.of(post.instance)))

    def _roomy(self, post: Post, count: int, now_ns: int) -> list[SequenceStatus]:
        """As many that are ready as find room side by side. Where nobody has room its engine is not even asked for a
        lease; the next snapshot asks again.
        """
        ready = self._ready(post, now_ns) if count else []
        rooms = self._rooms(post, now_ns) if ready else []
        chosen: list[SequenceStatus] = []
        for status in ready:
            largest = max(rooms, default=-1)
            if len(chosen) < count and status.blocks <= largest:
                chosen.append(status)
                rooms[rooms.index(largest)] = largest - status.blocks - self._desk.limits.growth_blocks
        return chosen

    def _ready(self, post: Post, now_ns: int) -> list[SequenceStatus]:
        """Sequences that decode and may move, in the engine's running order."""
        moving = self._departures.moving(post.instance)
        return [
            status
            for status in post.sequences()
            if status.state is SequenceState.RUNNING
            and status.output_tokens >= 1
            and status.sequence not in moving
            and not post.backoff.is_resting(status.sequence, now_ns)
            and self._may_leave(post, status)
        ]

    def _may_leave(self, post: Post, status: SequenceStatus) -> bool:
        attempts = post.evacuation.attempts.get(status.sequence, 0) if post.evacuation is not None else 0
        return not status.immovable and attempts < ATTEMPTS_MAX

    def on_finished(self, post: Post, body: MigrationFinished, now_ns: int) -> list[Effect]:
        """A migration from here ended. Says so, but for handoffs that nobody took: those are told of together."""
        moved = body.outcome is MigrationOutcome.MOVED
        refused_handoff = body.reason is MigrationReason.HANDOFF and not moved and body.refusal in NOBODY
        if moved:
            post.backoff.moved(body.sequence, now_ns)
        elif refused_handoff and post.evacuation is None:
            return self._back_off(post, body, now_ns)
        else:
            post.backoff.leave(body.sequence, now_ns)
        if post.evacuation is not None:
            post.evacuation.moved += moved
            post.evacuation.failed += not moved
            if not moved and body.refusal not in PATIENCE:
                attempts = post.evacuation.attempts
                attempts[body.sequence] = attempts.get(body.sequence, 0) + 1
            self._desk.metrics.evacuated["moved" if moved else "failed"] += 1
        return [wording.finished_line(body)]

    def _back_off(self, post: Post, body: MigrationFinished, now_ns: int) -> list[Effect]:
        """Less often from now on; the first refusal after a quiet time is told."""
        assert body.refusal is not None
        need = next((status.blocks for status in post.sequences() if status.sequence == body.sequence), 1)
        room = self._desk.surroundings.shown(post.instance, now_ns)
        refused = Refused(sequence=body.sequence, reason=body.refusal, need=max(1, need), room=room)
        if post.backoff.refused(refused, self._desk.rng, now_ns):
            self._desk.metrics.handoff_pauses[str(body.refusal)] += 1
        if not post.backoff.note(now_ns):
            return []
        fields = {"instance": post.instance, "target": body.target, "refusal": str(body.refusal), "detail": body.detail}
        return [Log(level="info", event="handoffs_refused", fields=fields)]

    def _end_if_done(self, post: Post, evacuation: Evacuation, now_ns: int) -> list[Effect]:
        moving = self._departures.moving(post.instance)
        if now_ns < evacuation.until_ns and (moving or not self._is_done(post, evacuation, now_ns)):
            again_ns = min(evacuation.until_ns, now_ns + LOOK_NS)
            return [StartTimer(name=f"{EVACUATION}/{post.instance}", at_ns=again_ns)]
        return self._end(post, evacuation, now_ns)

    def abandon(self, post: Post, now_ns: int) -> list[Effect]:
        """This process ends: an evacuation is over, however far it came."""
        return self._end(post, post.evacuation, now_ns) if post.evacuation is not None else []

    def _end(self, post: Post, evacuation: Evacuation, now_ns: int) -> list[Effect]:
        post.evacuation = None
        answer = InstanceEvacuated(
            instance=post.instance,
            moved=evacuation.moved,
            failed=evacuation.failed,
            left=len(_still_there(post, now_ns)),
        )
        return [Reply(to=to, body=answer) for to in evacuation.waiters]

    def _is_done(self, post: Post, evacuation: Evacuation, now_ns: int) -> bool:
        if not self._desk.surroundings.has_others(post.instance):
            return True  # there is nowhere to go
        if post.heard_ns <= evacuation.since_ns:
            return now_ns - evacuation.since_ns >= SNAPSHOT_NS
        return not any(self._may_leave(post, status) for status in _still_there(post, now_ns))


def _still_there(post: Post, now_ns: int) -> list[SequenceStatus]:
    """Sequences of the last snapshot but for those that moved so lately that it may be older than that."""
    return [status for status in post.sequences() if not post.backoff.has_moved(status.sequence, now_ns)]
