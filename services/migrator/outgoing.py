"""Migrations away from our instances: what each step asks, and what follows its answer.

    LEASING → ALLOTTING → PREPARING → (PULLING* → FREEZING)* → COMMITTING → ENDED          the whole table: state.py

PREPARING reads the first blocks as well; FREEZING is answered with the new full blocks instead where another round
pays. Each step waits for one answer and ends at its deadline at the latest. What fails before the freeze is REFUSED,
what fails after it is ABORTED; in both cases the target is told, the lease is ended, and the source decodes on. With
``recompute`` nothing is prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from millrace.actor.effects import Effect, Request, reply
from millrace.contracts.kv import KvRefusal, compatible
from millrace.contracts.leases import KvLeased, KvPulled, KvRefused, MigrationPrepared, SequenceFrozen, UnreserveKv
from millrace.contracts.local import RequestFailure
from millrace.contracts.message import Body
from millrace.contracts.migration import (
    EpochAllotted,
    MigrationFinished,
    MigrationMode,
    MigrationOutcome,
    MoveSequence,
)
from millrace.contracts.sequences import request_id_of
from millrace.contracts.status import InstanceRecord

from services.migrator import messages
from services.migrator.context import MS, OUT, MigratorContext, Refusal, refusal_of, say
from services.migrator.state import MIGRATIONS, MigrationGuard, MigrationQuestion, MigrationStep, OutgoingMigration

#: Migrations away from an instance at a time: brokers keep far below it, worker leases too.
MIGRATIONS_MAX = 32

#: A pull shall take this part of a lease.
LEASE_SHARE = 4


class OutgoingMigrations:
    """Owns every migration away from the instances of one actor.

    Attributes:
        finished: Migrations that ended with the last message; taken by the actor.
    """

    def __init__(self, context: MigratorContext) -> None:
        self._context = context
        self._open: dict[str, OutgoingMigration] = {}
        self.finished: list[MigrationFinished] = []

    def __iter__(self) -> Iterator[OutgoingMigration]:
        return iter(self._open.values())

    def of(self, instance: str) -> list[OutgoingMigration]:
        """Those away from one instance."""
        return [out for out in self._open.values() if out.source == instance]

    # the order

    def begin(self, source: str, order: MoveSequence, reply_to: str, now_ns: int) -> list[Effect]:
        """A broker's order is carried out at once, or refused."""
        out = OutgoingMigration(
            migration=f"{self._context.rng.getrandbits(48):012x}",
            source=source,
            order=order,
            mode=order.mode or self._context.config.mode,
            reply_to=reply_to,
            started_ns=now_ns,
        )
        refused = self._forbidden(out)
        if refused is not None:
            out.outcome, (out.refusal, out.detail) = MigrationOutcome.REFUSED, refused
            return self._report(out, now_ns)
        self._open[out.migration] = out
        return self._lease(out, now_ns)

    def _forbidden(self, out: OutgoingMigration) -> Refusal | None:
        """Reason not to try the migration at all."""
        records, under_way = self._context.records, self.of(out.source)
        source = records.get(out.source)
        if source is None:
            return KvRefusal.UNABLE, "not registered"
        if source.kv is None and out.mode is not MigrationMode.RECOMPUTE:
            return KvRefusal.UNABLE, source.kv_refusal or f"{out.source} moves nothing"
        if any(other.sequence == out.sequence for other in under_way):
            return KvRefusal.INVALID, "it moves already"
        if len(under_way) >= MIGRATIONS_MAX:
            return KvRefusal.TOO_MANY, f"{len(under_way)} are under way"
        return wrong_target(out, source, records.get(out.target))

    # answers

    def on_answer(
        self, migration: str, number: int, body: Body | RequestFailure, traceparent: str, now_ns: int
    ) -> list[Effect]:
        """The answer to a migration's last question, or that there is none; what is older says nothing any more."""
        out = self._open.get(migration)
        if out is None or number != out.number:
            return []
        rows = MIGRATIONS.rows(out.step, type(body)) if isinstance(body, Body) else ()
        if not rows:
            return self._on_refusal(out, body, now_ns)
        self._note(out, body, traceparent, now_ns)
        assert isinstance(body, Body)
        row = MIGRATIONS.take(out.step, type(body), lambda guard: self._holds(out, guard, now_ns), who=out.migration)
        out.step = row.target
        return _QUESTIONS[row.reaction](self, out, now_ns)

    def _on_refusal(self, out: OutgoingMigration, body: Body | RequestFailure, now_ns: int) -> list[Effect]:
        refused = refusal_of(body, str(out.step))
        if out.step is MigrationStep.LEASING and isinstance(body, KvRefused):
            out.lease.held = False
        return self._fail(out, refused, now_ns)

    def _holds(self, out: OutgoingMigration, guard: MigrationGuard, now_ns: int) -> bool:
        match guard:
            case MigrationGuard.RECOMPUTES:
                return out.mode is MigrationMode.RECOMPUTE
            case MigrationGuard.LEASE_SHORT:
                return out.lease.until_ns - now_ns < self._context.limits.lease_ms * MS // 2
            case MigrationGuard.ROUND_DONE:
                return out.copy.from_block >= out.copy.round_to
            case MigrationGuard.UNPREPARED:
                return not out.room.asked

    def _note(self, out: OutgoingMigration, body: Body | RequestFailure, traceparent: str, now_ns: int) -> None:
        match body:
            case KvLeased():
                self._note_lease(out, body, traceparent, now_ns)
            case EpochAllotted():
                out.room.epoch, out.room.span = body.epoch, body.traceparent
                if not out.span:
                    out.traceparent, out.span = body.traceparent, messages.below(body.traceparent, self._context.rng)
                out.events.append(("epoch allotted", now_ns, {"epoch": body.epoch}))
            case MigrationPrepared():
                self._note_room(out, body, now_ns)
            case KvPulled():
                self._note_read(out, body, now_ns)
            case SequenceFrozen():
                out.freeze.frozen = body
                # The source's clock may be another machine's: what it says counts as far as it can be.
                out.freeze.stopped_ns = min(now_ns, max(out.freeze.asked_ns, body.frozen_ns))
                fields = {"output_tokens": len(body.output_token_ids), "blocks": len(body.blocks)}
                out.events.append(("frozen", now_ns, fields))
            case _:
                out.freeze.committed_ns, out.outcome = now_ns, MigrationOutcome.MOVED
                out.events.append(("committed", now_ns, {"frozen_ms": out.frozen_ns / 1e6}))

    def _note_lease(self, out: OutgoingMigration, body: KvLeased, traceparent: str, now_ns: int) -> None:
        lease, lease_ns = out.lease, self._context.limits.lease_ms * MS
        if out.step is MigrationStep.FREEZING:
            lease.asked_ns = out.freeze.asked_ns
            out.copy.round += 1
            out.copy.round_to = min(body.from_block + len(body.blocks), out.room.blocks)
        lease.until_ns = lease.asked_ns + lease_ns
        lease.slow_ns = max(lease.slow_ns, now_ns - lease.asked_ns)
        lease.epoch, lease.answer = body.epoch, body
        if body.submission is not None:
            lease.submission, lease.endpoint = body.submission, body.endpoint
        if out.step is MigrationStep.LEASING:
            out.traceparent, out.span = traceparent, messages.below(traceparent, self._context.rng)
            out.events.append(("leased", now_ns, {"blocks": len(body.blocks), "epoch": body.epoch}))

    def _note_room(self, out: OutgoingMigration, body: MigrationPrepared, now_ns: int) -> None:
        copy, leased = out.copy, out.lease.answer
        assert leased is not None
        out.lease.slow_ns = max(out.lease.slow_ns, now_ns - out.room.asked_ns - body.duration_ns)
        copy.matched_blocks = copy.from_block = body.matched_blocks
        copy.copier = str(body.copier)
        copy.round = int(body.blocks > 0)
        copy.round_to = min(len(leased.blocks), out.room.blocks) if body.blocks else 0
        fields = {"matched_blocks": body.matched_blocks, "copier": str(body.copier)}
        out.events.append(("prepared", now_ns, fields))
        if body.blocks:
            self._note_read(out, body, now_ns)
        else:
            messages.note_clock(out, body.at_ns, now_ns)

    def _note_read(self, out: OutgoingMigration, body: MigrationPrepared | KvPulled, now_ns: int) -> None:
        copy = out.copy
        copy.from_block += body.blocks
        copy.bytes += body.bytes
        copy.descriptors += body.descriptors
        copy.copied_ns += body.duration_ns
        messages.note_clock(out, body.at_ns, now_ns)
        # As much as takes a quarter of a lease, at the speed of this one, messages included.
        lease_ns, took_ns = self._context.limits.lease_ms * MS, max(1, now_ns - out.room.asked_ns)
        copy.pull_bytes = max(1, body.bytes * lease_ns // (LEASE_SHARE * took_ns))
        fields = {"round": copy.round, "blocks": body.blocks, "bytes": body.bytes, "descriptors": body.descriptors}
        out.events.append(("pulled", now_ns, fields | {"took_ms": body.duration_ns / 1e6}))

    # questions

    def _ask(self, out: OutgoingMigration, subject: str, body: Body, timeout_ns: int) -> list[Effect]:
        out.number += 1
        submits = out.step is MigrationStep.COMMITTING
        return [
            Request(
                subject=subject,
                body=body,
                correlation=f"{OUT}/{out.migration}/{out.number}",
                timeout_ns=max(MS, timeout_ns),
                request=request_id_of(out.sequence),
                traceparent=(out.room.span if submits else "") or out.span,
            )
        ]

    def _lease(self, out: OutgoingMigration, now_ns: int) -> list[Effect]:
        limits = self._context.limits
        out.lease.asked_ns, out.lease.held = now_ns, True
        if out.step is MigrationStep.LEASING:
            out.lease.until_ns = now_ns + limits.lease_ms * MS
        body = messages.lease_of(out, limits)
        return self._ask(out, self._engine(out.source, "lease"), body, limits.answer_ms * MS)

    def _allot(self, out: OutgoingMigration, now_ns: int) -> list[Effect]:
        record, submission = self._context.records.get(out.target), out.lease.submission
        if submission is None:
            return self._fail(out, (KvRefusal.INVALID, "the lease does not tell the submission"), now_ns)
        if record is None:
            return self._fail(out, (KvRefusal.NO_TARGET, f"{out.target} is gone"), now_ns)
        subject = self._context.subjects.epoch(submission.ingress)
        return self._ask(out, subject, messages.allot_of(out, record.incarnation), self._context.limits.answer_ms * MS)

    def _left_ms(self, out: OutgoingMigration, until_ns: int, now_ns: int) -> int:
        """Milliseconds that a read may take before a deadline of the source; not positive where it is too late."""
        return (until_ns - now_ns) // MS - self._context.limits.margin_ms

    def _prepare(self, out: OutgoingMigration, now_ns: int) -> list[Effect]:
        limits, read_ms = self._context.limits, self._left_ms(out, out.lease.until_ns, now_ns)
        if read_ms <= 0:
            return self._fail(out, LEASE_OVER, now_ns)
        body = messages.prepare_of(out, limits, read_ms=read_ms)
        out.room.asked, out.room.asked_ns, out.room.blocks = True, now_ns, body.blocks
        timeout_ns = max(out.lease.until_ns - now_ns, limits.answer_ms * MS)
        return self._ask(out, self._engine(out.target, "prepare"), body, timeout_ns)

    def _pull(self, out: OutgoingMigration, now_ns: int) -> list[Effect]:
        read_ms = self._left_ms(out, out.lease.until_ns, now_ns)
        if read_ms <= 0:
            return self._fail(out, LEASE_OVER, now_ns)
        out.room.asked_ns = now_ns
        body = messages.pull_of(out, self._context.limits, read_ms=read_ms)
        return self._ask(out, self._engine(out.target, "pull"), body, out.lease.until_ns - now_ns)

    def _freeze(self, out: OutgoingMigration, now_ns: int) -> list[Effect]:
        limits = self._context.limits
        freeze_ns = messages.freeze_ms_of(out, limits) * MS
        out.freeze.asked_ns, out.freeze.until_ns = now_ns, now_ns + freeze_ns
        return self._ask(out, self._engine(out.source, "freeze"), messages.freeze_of(out, limits), freeze_ns)

    def _commit(self, out: OutgoingMigration, now_ns: int) -> list[Effect]:
        until_ns = out.freeze.until_ns
        read_ms = self._left_ms(out, until_ns, now_ns)
        if read_ms <= 0:
            return self._fail(out, (KvRefusal.UNANSWERED, "the source stood still too late"), now_ns)
        ends_ns = until_ns - self._context.limits.margin_ms * MS
        body = messages.commit_of(out, read_ms=read_ms, until_ns=ends_ns)
        return self._ask(out, self._engine(out.target, "submit"), body, until_ns - now_ns)

    def _engine(self, instance: str, verb: str) -> str:
        return self._context.subjects.engine(instance, verb)

    # the end

    def _fail(self, out: OutgoingMigration, refused: Refusal, now_ns: int) -> list[Effect]:
        """Gives up: the target is told, and the lease is ended."""
        step = out.step
        # A refused freeze has frozen nothing; an unanswered one may have.
        frozen = step is MigrationStep.COMMITTING or (
            step is MigrationStep.FREEZING and refused[0] is KvRefusal.UNANSWERED
        )
        out.step = MigrationStep.ENDED
        out.outcome = MigrationOutcome.ABORTED if frozen else MigrationOutcome.REFUSED
        out.refusal, out.detail = refused
        return [*self._abort_target(out), *self._finish(out, now_ns)]

    def _abort_target(self, out: OutgoingMigration) -> list[Effect]:
        """Frees what the target has reserved, where it was asked for anything."""
        if not out.room.asked:
            return []
        over = UnreserveKv(migration=out.migration)
        return [say(self._engine(out.target, "unreserve"), over, out.sequence, out.span)]

    def _release(self, out: OutgoingMigration) -> list[Effect]:
        """Lets the source's sequence go, or go on."""
        if not out.lease.held:
            return []
        out.lease.held = False
        return [say(self._engine(out.source, "end"), messages.end_of(out), out.sequence, out.span)]

    def _finish(self, out: OutgoingMigration, now_ns: int) -> list[Effect]:
        released = self._release(out)
        del self._open[out.migration]
        return [*released, *self._report(out, now_ns), *messages.span_of(out, now_ns)]

    def _report(self, out: OutgoingMigration, now_ns: int) -> list[Effect]:
        record = self._context.records.get(out.source)
        body = messages.finished(out, record.model if record is not None else "", now_ns)
        self._context.metrics.finish(body)
        self.finished.append(body)
        answer = reply(out.reply_to, body, request=request_id_of(out.sequence))
        if not body.model:
            return answer
        subject = self._context.subjects.migration(body.model, body.source, body.target)
        return [say(subject, body, out.sequence, out.span), messages.finished_line(body), *answer]

    def abandon(self, now_ns: int) -> list[Effect]:
        """This process ends: every source is told to go on, and nobody waits in vain."""
        effects: list[Effect] = []
        for out in list(self._open.values()):
            out.outcome, out.refusal = MigrationOutcome.ABORTED, KvRefusal.CANCELLED
            out.detail = "the migrator stops"
            # While a target may be reading, its source stays as it is; it goes on by its own deadline.
            if out.step is not MigrationStep.COMMITTING:
                effects += [*self._abort_target(out), *self._release(out)]
            del self._open[out.migration]
            effects += self._report(out, now_ns)
        return effects

    def check(self) -> None:
        for source in {out.source for out in self}:
            under_way = self.of(source)
            assert len(under_way) <= MIGRATIONS_MAX
            assert len({out.sequence for out in under_way}) == len(under_way), "a sequence moves once at a time"


LEASE_OVER = KvRefusal.LEASE_LOST, "the lease was over before the round began"

#: What each reaction of the table does.
_QUESTIONS: Mapping[MigrationQuestion, Callable[[OutgoingMigrations, OutgoingMigration, int], list[Effect]]] = (
    MappingProxyType(
        {
            MigrationQuestion.ALLOT: OutgoingMigrations._allot,
            MigrationQuestion.PREPARE: OutgoingMigrations._prepare,
            MigrationQuestion.RENEW: OutgoingMigrations._lease,
            MigrationQuestion.PULL: OutgoingMigrations._pull,
            MigrationQuestion.FREEZE: OutgoingMigrations._freeze,
            MigrationQuestion.COMMIT: OutgoingMigrations._commit,
            MigrationQuestion.END: OutgoingMigrations._finish,
        }
    )
)


def wrong_target(out: OutgoingMigration, source: InstanceRecord, target: InstanceRecord | None) -> Refusal | None:
    """Reason why the target cannot take it."""
    if out.target == out.source:
        return KvRefusal.INVALID, "source and target are the same"
    if target is None:
        return KvRefusal.NO_TARGET, f"{out.target} is not registered"
    if target.model != source.model:
        return KvRefusal.INCOMPATIBLE, f"{out.target} serves {target.model}"
    if out.mode is not MigrationMode.RECOMPUTE and not compatible(source.kv, target.kv):
        return KvRefusal.INCOMPATIBLE, target.kv_refusal or f"KV of {out.target} is of another kind"
    return None
