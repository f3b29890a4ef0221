"""Migrations to our instances: the side that makes room, reads and takes over.

    RESERVING → READY → (PULLING → READY)* → COMMITTING → COMMITTED          from any of them but the last two: OVER

Each question may come again, by a repeat or late: one that is being answered is joined, one that was answered is
answered alike, and what contradicts that is refused INVALID. A reservation without news is given up; the worker does
the same by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from millrace.actor.effects import CancelTimer, Effect, Reply, StartTimer
from millrace.contracts.kv import KvHandover, KvRefusal
from millrace.contracts.leases import KvPulled, KvReserved, PullKv, ReserveKv, UnreserveKv
from millrace.contracts.local import RequestFailure
from millrace.contracts.message import Body, Message
from millrace.contracts.migration import (
    AbortMigration,
    BlocksPulled,
    CommitMigration,
    MigrationCommitted,
    MigrationPrepared,
    MigrationRefused,
    PrepareMigration,
    PullBlocks,
)
from millrace.contracts.sequences import request_id_of
from millrace.contracts.worker import SequenceAccepted, SubmitSequence

from services.migrator import spans
from services.migrator.context import INTO, MS, Ask, MigratorContext, answer_all, ask, refusal_of, say
from services.migrator.state import OPEN_STAGES, IncomingMigration, IncomingStage

#: What is over is remembered for so long, to answer what is repeated.
REMEMBER_NS = 5_000 * MS

#: And no more of them than this; the oldest go first.
REMEMBERED_MAX = 1_024


class IncomingMigrations:
    """Owns every migration to the instances of one actor."""

    def __init__(self, context: MigratorContext) -> None:
        self._context = context
        self._known: dict[str, IncomingMigration] = {}

    def __iter__(self) -> Iterator[IncomingMigration]:
        return iter(self._known.values())

    def busy(self, instance: str) -> int:
        """Slots taken."""
        return sum(into.stage in OPEN_STAGES for into in self._known.values() if into.instance == instance)

    # prepare

    def on_prepare(self, instance: str, body: PrepareMigration, message: Message, now_ns: int) -> list[Effect]:
        """Makes room, if the worker has any."""
        known = self._known.get(body.migration)
        if known is not None:
            return self._repeated_prepare(known, message.reply_to)
        if self.busy(instance) >= self._context.limits.in_max:
            detail = f"{self._context.limits.in_max} come already"
            return _refuse(message.reply_to, body.migration, KvRefusal.TOO_MANY, detail)
        into = IncomingMigration(
            instance=instance,
            prepare=body,
            waiters=[message.reply_to] if message.reply_to else [],
            began_ns=now_ns,
            news_ns=now_ns,
            span=spans.below(message.traceparent, self._context.rng),
            parent_span=message.traceparent,
        )
        self._remember(into)
        return self._reserve(into)

    def _repeated_prepare(self, known: IncomingMigration, reply_to: str) -> list[Effect]:
        if known.stage is IncomingStage.RESERVING:
            known.waiters += [reply_to] if reply_to else []
            return []
        answer = known.answer if known.stage is IncomingStage.OVER else known.prepared
        return self._reply(known, reply_to, answer) if answer is not None else []

    def _reserve(self, into: IncomingMigration) -> list[Effect]:
        submission = into.prepare.submission
        body = ReserveKv(
            migration=into.migration,
            sequence=submission.sequence,
            epoch=submission.epoch,
            endpoint=into.prepare.endpoint,
            token_ids=[*submission.prompt_token_ids, *submission.output_token_ids],
            blocks=into.prepare.blocks,
            reserve_ms=into.prepare.reserve_ms,
        )
        return self._ask(into, "reserve", body, self._context.limits.answer_ms * MS)

    # rounds

    def on_pull(self, body: PullBlocks, message: Message, now_ns: int) -> list[Effect]:
        """One round, once."""
        into = self._known.get(body.migration)
        if into is None:
            return _refuse(message.reply_to, body.migration, KvRefusal.INVALID, "unknown here")
        if into.stage is IncomingStage.PULLING and body.round == into.pull:
            into.waiters += [message.reply_to] if message.reply_to else []
            return []
        if into.stage is IncomingStage.READY and body.round == into.pull and isinstance(into.answer, BlocksPulled):
            return self._reply(into, message.reply_to, into.answer)
        if into.stage is not IncomingStage.READY or body.round != into.pull + 1:
            return self._contradiction(into, message.reply_to, f"round {body.round}")
        into.stage, into.pull, into.news_ns = IncomingStage.PULLING, body.round, now_ns
        into.waiters = [message.reply_to] if message.reply_to else []
        pull = PullKv(
            migration=body.migration,
            from_block=body.from_block,
            blocks=body.blocks,
            read_ms=body.read_ms,
            checksums=body.checksums,
            until_ns=body.until_ns,
        )
        timeout_ns = (body.read_ms + self._context.limits.margin_ms) * MS
        return [CancelTimer(name=_timer(into)), *self._ask(into, "pull", pull, timeout_ns)]

    # commit

    def on_commit(self, body: CommitMigration, message: Message, now_ns: int) -> list[Effect]:
        """The source stands still: the worker gets the sequence, and reads the rest itself."""
        into = self._known.get(body.migration)
        if into is None:
            return _refuse(message.reply_to, body.migration, KvRefusal.INVALID, "unknown here")
        if into.stage is IncomingStage.COMMITTING:
            into.waiters += [message.reply_to] if message.reply_to else []
            return []
        if into.stage is IncomingStage.COMMITTED and into.answer is not None:
            return self._reply(into, message.reply_to, into.answer)
        if into.stage is not IncomingStage.READY:
            return self._contradiction(into, message.reply_to, "commit")
        into.stage, into.news_ns = IncomingStage.COMMITTING, now_ns
        into.waiters = [message.reply_to] if message.reply_to else []
        into.events.append(("commit", now_ns, {"blocks": len(body.blocks), "from_block": body.from_block}))
        submission = submission_of(into.prepare, body)
        timeout_ns = (body.read_ms + self._context.limits.margin_ms) * MS
        return [CancelTimer(name=_timer(into)), *self._ask(into, "submit", submission, timeout_ns)]

    def on_abort(self, body: AbortMigration, now_ns: int) -> list[Effect]:
        """The source gives up. Once the worker was asked to take the sequence, ingress judges instead."""
        into = self._known.get(body.migration)
        if into is None or into.stage not in OPEN_STAGES or into.stage is IncomingStage.COMMITTING:
            return []
        return self._over(into, body.reason, body.detail or "aborted by the source", now_ns)

    # the worker's answers and time

    def on_answer(self, migration: str, number: int, body: Body | RequestFailure, now_ns: int) -> list[Effect]:
        """The worker has answered the last question, or has not."""
        into = self._known.get(migration)
        if into is None or number != into.number:
            return []
        match into.stage, body:
            case IncomingStage.RESERVING, KvReserved():
                prepared = MigrationPrepared(
                    migration=migration,
                    matched_blocks=body.matched_blocks,
                    copier=str(body.copier),
                    at_ns=body.at_ns,
                )
                into.prepared = prepared
                into.events.append(("reserved", now_ns, {"matched_blocks": body.matched_blocks}))
                return self._ready(into, prepared, now_ns)
            case IncomingStage.PULLING, KvPulled():
                into.events.append(("pulled", now_ns, {"blocks": body.blocks, "bytes": body.bytes}))
                return self._ready(into, _pulled(into, body), now_ns)
            case IncomingStage.COMMITTING, SequenceAccepted():
                return self._committed(into, body, now_ns)
            case IncomingStage.OVER | IncomingStage.COMMITTED | IncomingStage.READY, _:
                return []
            case _:
                return self._over(into, *refusal_of(body, str(into.stage)), now_ns)

    def _ready(self, into: IncomingMigration, answer: Body, now_ns: int) -> list[Effect]:
        into.stage, into.answer, into.news_ns = IncomingStage.READY, answer, now_ns
        timer = StartTimer(name=_timer(into), at_ns=now_ns + into.prepare.reserve_ms * MS)
        return [timer, *answer_all(into.waiters, answer, into.sequence)]

    def _committed(self, into: IncomingMigration, body: SequenceAccepted, now_ns: int) -> list[Effect]:
        committed = MigrationCommitted(migration=into.migration, sequence=body.sequence, epoch=body.epoch)
        into.stage, into.answer, into.news_ns = IncomingStage.COMMITTED, committed, now_ns
        self._context.metrics.arrived["committed"] += 1
        return [
            *answer_all(into.waiters, committed, into.sequence),
            *spans.target_span(into, now_ns, error=""),
        ]

    def on_timer(self, migration: str, now_ns: int) -> list[Effect]:
        """A reservation has had no news for too long."""
        into = self._known.get(migration)
        if into is None or into.stage is not IncomingStage.READY:
            return []
        return self._over(into, KvRefusal.UNANSWERED, "no news from the source", now_ns)

    def _over(self, into: IncomingMigration, reason: KvRefusal, detail: str, now_ns: int) -> list[Effect]:
        """Nothing will come of it: whoever waits hears so, the worker frees what it holds for it."""
        into.stage, into.news_ns = IncomingStage.OVER, now_ns
        into.answer = MigrationRefused(migration=into.migration, reason=reason, detail=detail)
        self._context.metrics.arrived[str(reason)] += 1
        subject = self._context.subjects.engine(into.instance, "unreserve")
        return [
            CancelTimer(name=_timer(into)),
            say(subject, UnreserveKv(migration=into.migration), into.sequence, into.span),
            *answer_all(into.waiters, into.answer, into.sequence),
            *spans.target_span(into, now_ns, error=f"{reason}: {detail}"),
        ]

    # small things

    def _ask(self, into: IncomingMigration, verb: str, body: Body, timeout_ns: int) -> list[Effect]:
        into.number += 1
        subject = self._context.subjects.engine(into.instance, verb)
        # What the worker does with the sequence itself is below what ingress made for it.
        submits = into.stage is IncomingStage.COMMITTING
        about = (into.sequence, (into.prepare.traceparent if submits else "") or into.span)
        question = Ask(subject=subject, body=body, timeout_ns=timeout_ns, about=about)
        return [ask(INTO, into.migration, into.number, question)]

    def _reply(self, into: IncomingMigration, to: str, body: Body) -> list[Effect]:
        return [Reply(to=to, body=body, request=request_id_of(into.sequence))] if to else []

    def _contradiction(self, into: IncomingMigration, to: str, what: str) -> list[Effect]:
        if into.stage is IncomingStage.OVER and into.answer is not None:
            return self._reply(into, to, into.answer)
        return _refuse(to, into.migration, KvRefusal.INVALID, f"{what} while {into.stage}, after round {into.pull}")

    def _remember(self, into: IncomingMigration) -> None:
        over = [m for m, known in self._known.items() if known.stage not in OPEN_STAGES]
        for migration in over[: max(0, len(self._known) + 1 - REMEMBERED_MAX)]:
            del self._known[migration]
        self._known[into.migration] = into

    def tick(self, now_ns: int) -> None:
        """Forgets what was over long ago."""
        for migration, into in list(self._known.items()):
            if into.stage not in OPEN_STAGES and now_ns - into.news_ns >= REMEMBER_NS:
                del self._known[migration]

    def abandon(self, now_ns: int) -> list[Effect]:
        """This process ends: what is only reserved is given back; what was handed over stays where it is."""
        group = [into for into in self if into.stage in OPEN_STAGES and into.stage is not IncomingStage.COMMITTING]
        return [e for into in group for e in self._over(into, KvRefusal.CANCELLED, "the migrator stops", now_ns)]

    def check(self) -> None:
        """Bounds hold."""
        for instance in {into.instance for into in self}:
            assert self.busy(instance) <= self._context.limits.in_max, "three in at a time"
        for into in self:
            waits = into.stage in (IncomingStage.RESERVING, IncomingStage.PULLING, IncomingStage.COMMITTING)
            assert waits or not into.waiters, f"{into.migration}: somebody waits for nothing"


def submission_of(prepare: PrepareMigration, commit: CommitMigration) -> SubmitSequence:
    """The sequence as the target's worker gets it: with every token, and where the rest of its KV is."""
    handover = KvHandover(
        migration=commit.migration,
        endpoint=prepare.endpoint,
        from_block=commit.from_block,
        blocks=commit.blocks,
        computed_tokens=commit.computed_tokens,
        read_ms=commit.read_ms,
        checksums=commit.checksums,
        until_ns=commit.until_ns,
    )
    return msgspec.structs.replace(
        prepare.submission,
        output_token_ids=commit.output_token_ids,
        output_logprobs=commit.logprobs,
        handover=handover,
    )


def _pulled(into: IncomingMigration, body: KvPulled) -> BlocksPulled:
    return BlocksPulled(
        migration=into.migration,
        round=into.pull,
        blocks=body.blocks,
        bytes=body.bytes,
        descriptors=body.descriptors,
        duration_ns=body.duration_ns,
        copier=str(body.copier),
        at_ns=body.at_ns,
    )


def _timer(into: IncomingMigration) -> str:
    return f"{INTO}/{into.migration}"


def _refuse(to: str, migration: str, reason: KvRefusal, detail: str) -> list[Effect]:
    return [Reply(to=to, body=MigrationRefused(migration=migration, reason=reason, detail=detail))] if to else []
