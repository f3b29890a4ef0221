"""Migrations away from our instances: the side that drives.

    QUEUED → (RESTING →) LEASING → ALLOTTING → PREPARING → (PULLING → RENEWING)* → FREEZING → COMMITTING → ENDING

Each step but the first waits for one answer or one timer, and ends at its deadline at the latest. What fails before
the freeze is REFUSED, what fails after it is ABORTED; in both cases the target is told, the lease is ended, and the
source decodes on. With ``recompute`` nothing is prepared and the sequence is submitted to the target's worker itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from millrace.actor.effects import CancelTimer, Effect, StartTimer
from millrace.contracts.kv import KvRefusal
from millrace.contracts.leases import KvLeased, KvRefused, SequenceFrozen
from millrace.contracts.local import RequestFailure
from millrace.contracts.message import Body
from millrace.contracts.migration import (
    AbortMigration,
    BlocksPulled,
    EpochAllotted,
    MigrateSequence,
    MigrationCommitted,
    MigrationFinished,
    MigrationMode,
    MigrationOutcome,
    MigrationPrepared,
    MigrationReason,
)
from millrace.contracts.worker import SequenceAccepted
from millrace.policies.migration import Wish, freeze_now

from services.migrator import judging, spans, wording
from services.migrator.desk import MS, OUT, Ask, Desk, answer_all, ask, refusal_of, say
from services.migrator.judging import Refused
from services.migrator.state import Outgoing, Step, asked_for
from services.migrator.surroundings import LISTEN_NS

#: A target that says so is not asked again for this migration; another one may be.
ELSEWHERE = frozenset(
    {
        KvRefusal.NO_BLOCKS,
        KvRefusal.TOO_MANY,
        KvRefusal.INCOMPATIBLE,
        KvRefusal.UNABLE,
        KvRefusal.TARGET_REFUSED,
        KvRefusal.UNANSWERED,
    }
)

#: The source may say something else a little later.
LATER = frozenset({KvRefusal.NOT_RUNNING, KvRefusal.TOO_MANY})

#: How often the source is told that its lease is over.
ENDS_MAX = 2


class Departures:
    """Owns every migration away from the instances of one actor.

    Attributes:
        finished: Migrations that ended with the last message, for whoever wanted them; taken by the actor.
    """

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._open: dict[str, Outgoing] = {}
        self.finished: list[MigrationFinished] = []

    def __iter__(self) -> Iterator[Outgoing]:
        return iter(self._open.values())

    def of(self, instance: str) -> list[Outgoing]:
        """Those away from one instance."""
        return [out for out in self._open.values() if out.source == instance]

    def busy(self, instance: str) -> int:
        """Slots taken."""
        return sum(out.busy for out in self._open.values() if out.source == instance)

    def moving(self, instance: str) -> set[str]:
        """Sequences that are on their way, or wait to be."""
        return {out.sequence for out in self._open.values() if out.source == instance}

    # the asking

    def ask_for(self, source: str, body: MigrateSequence, reply_to: str, now_ns: int) -> list[Effect]:
        """Somebody wants a sequence moved. One that moves already is joined."""
        known = next((o for o in self.of(source) if o.sequence == body.sequence), None)
        if known is not None and body.target in ("", known.wanted, known.target):
            known.waiters += [reply_to] if reply_to else []
            return []
        migration, mode = f"{self._desk.rng.getrandbits(48):012x}", body.mode or self._desk.config.mode
        out = asked_for(migration, source, body, mode, now_ns)
        out.waiters += [reply_to] if reply_to else []
        refused = (KvRefusal.INVALID, f"moves to {known.target or known.wanted}") if known else self._forbidden(out)
        if refused is not None:
            out.outcome, (out.refusal, out.detail) = MigrationOutcome.REFUSED, refused
            return self._tell(out, now_ns)
        self._open[out.migration] = out
        return self.pump(source, now_ns)

    def _forbidden(self, out: Outgoing) -> Refused | None:
        """Why it cannot even be tried."""
        around = self._desk.surroundings
        source, waiting = around.record(out.source), len(self.of(out.source))
        if source is None or source.kv is None:
            return judging.wrong_source(out, source)
        if waiting >= self._desk.limits.queued_max:
            return KvRefusal.TOO_MANY, f"{waiting} are under way or wait"
        return judging.wrong_target(out, source, around.record(out.wanted)) if out.wanted else None

    # slots

    def pump(self, source: str, now_ns: int) -> list[Effect]:
        """Begins what waits, as far as slots are free; the oldest first."""
        effects: list[Effect] = []
        for out in self.of(source):
            if out.step is Step.QUEUED:
                if self.busy(source) >= self._desk.limits.out_max:
                    return effects
                effects += self._begin(out, now_ns)
        return effects

    def _begin(self, out: Outgoing, now_ns: int) -> list[Effect]:
        listening = [] if out.wanted else self._listen(out, now_ns)
        if out.step is Step.RESTING:
            return listening
        out.started_ns = out.started_ns or now_ns
        return listening + self._lease(out, Step.LEASING, now_ns)

    def _listen(self, out: Outgoing, now_ns: int) -> list[Effect]:
        """Whoever shall choose a target must have heard of them; it holds neither slot nor lease until then."""
        around = self._desk.surroundings
        record = around.record(out.source)
        if record is None:
            return []
        effects = around.listen_to_model(record.model, now_ns)
        heard_ns = (around.heard_since(record.model) or now_ns) + LISTEN_NS
        if now_ns < heard_ns:
            out.step = Step.RESTING
            effects.append(StartTimer(name=f"{OUT}/{out.migration}", at_ns=heard_ns))
        return effects

    def _rest(self, out: Outgoing, refused: Refused, now_ns: int) -> list[Effect]:
        """It cannot move yet: its slot is free meanwhile."""
        pause_ns = self._desk.limits.retry_ms * MS
        if now_ns + pause_ns >= out.begin_until_ns:
            return self._fail(out, refused, now_ns)
        out.step, out.released = Step.RESTING, True
        return [StartTimer(name=f"{OUT}/{out.migration}", at_ns=now_ns + pause_ns), *self.pump(out.source, now_ns)]

    def on_timer(self, migration: str, now_ns: int) -> list[Effect]:
        """A rest is over."""
        out = self._open.get(migration)
        if out is None or out.step is not Step.RESTING:
            return []
        out.step = Step.QUEUED
        return self.pump(out.source, now_ns)

    # asking and hearing

    def _ask(self, out: Outgoing, step: Step, subject: str, body: Body, timeout_ns: int) -> list[Effect]:
        out.step = step
        out.number += 1
        about = (out.sequence, out.span)
        question = Ask(subject=subject, body=body, timeout_ns=timeout_ns, about=about)
        return [ask(OUT, out.migration, out.number, question)]

    def on_answer(
        self, migration: str, number: int, body: Body | RequestFailure, traceparent: str, now_ns: int
    ) -> list[Effect]:
        """The answer to the last request, or that there is none; what is older says nothing any more."""
        out = self._open.get(migration)
        if out is None or number != out.number:
            return []
        match out.step, body:
            case Step.LEASING, KvLeased():
                return self._on_leased(out, body, traceparent, now_ns)
            case Step.RENEWING, KvLeased():
                return self._on_renewed(out, body, now_ns)
            case Step.ALLOTTING, EpochAllotted():
                return self._on_allotted(out, body, now_ns)
            case Step.PREPARING, MigrationPrepared():
                return self._on_prepared(out, body, now_ns)
            case Step.PULLING, BlocksPulled():
                return self._on_pulled(out, body, now_ns)
            case Step.FREEZING, SequenceFrozen():
                return self._on_frozen(out, body, now_ns)
            case Step.COMMITTING, MigrationCommitted() | SequenceAccepted():
                return self._on_committed(out, now_ns)
            case Step.ENDING, _:
                return self._on_ended(out, body, now_ns)
            case _:
                return self._on_no(out, body, now_ns)

    def _on_no(self, out: Outgoing, body: Body | RequestFailure, now_ns: int) -> list[Effect]:
        """Everything that is not the answer that was wanted."""
        refused = refusal_of(body, str(out.step))
        if out.step is Step.LEASING and isinstance(body, KvRefused):
            out.released = True
            if refused[0] in LATER:
                return self._rest(out, refused, now_ns)
        if out.step is Step.PREPARING and refused[0] in ELSEWHERE:
            return self._try_elsewhere(out, refused, now_ns)
        return self._fail(out, refused, now_ns)

    # lease

    def _lease(self, out: Outgoing, step: Step, now_ns: int) -> list[Effect]:
        limits = self._desk.limits
        out.lease_until_ns, out.released = now_ns + limits.lease_ms * MS, False
        subject = self._desk.subjects.engine(out.source, "lease")
        return self._ask(out, step, subject, wording.lease_of(out, limits), limits.answer_ms * MS)

    def _on_leased(self, out: Outgoing, body: KvLeased, traceparent: str, now_ns: int) -> list[Effect]:
        if body.submission is None or body.endpoint is None:
            return self._fail(out, (KvRefusal.INVALID, "the lease does not tell the submission"), now_ns)
        if not out.span:
            out.traceparent, out.span = traceparent, spans.below(traceparent, self._desk.rng)
        out.epoch, out.leased, out.submission, out.endpoint = body.epoch, body, body.submission, body.endpoint
        out.events.append(("leased", now_ns, {"blocks": len(body.blocks), "epoch": body.epoch}))
        if out.wanted:
            out.target = out.wanted
            return self._allot(out, now_ns)
        return self._choose(out, now_ns)

    # target

    def _choose(self, out: Outgoing, now_ns: int) -> list[Effect]:
        desk, around = self._desk, self._desk.surroundings
        source = around.record(out.source)
        if source is None:
            return self._fail(out, (KvRefusal.UNABLE, f"{out.source} is not registered any more"), now_ns)
        recompute = out.mode is MigrationMode.RECOMPUTE
        wish = Wish(
            source=source,
            blocks=wording.blocks_of(out, desk.limits),
            recompute=recompute,
            excluded=frozenset(out.excluded),
        )
        question = around.question(out.sequence, wish, now_ns, handoff=out.reason is MigrationReason.HANDOFF)
        decision = desk.policy.decide(question, desk.parameters, now_ns, desk.rng)
        if decision.chosen is None:
            notes = ", ".join(f"{score.name}: {score.note}" for score in decision.scores)
            return self._fail(out, (KvRefusal.NO_TARGET, notes or decision.reason), now_ns)
        out.target = decision.chosen
        out.events.append(("target chosen", now_ns, {"target": out.target, "why": decision.reason}))
        return self._allot(out, now_ns)

    def _try_elsewhere(self, out: Outgoing, refused: Refused, now_ns: int) -> list[Effect]:
        out.excluded.add(out.target)
        effects = self._abort_target(out, refused)
        out.events.append(("target refused", now_ns, {"target": out.target, "why": str(refused[0])}))
        if out.wanted or len(out.excluded) >= self._desk.limits.targets_max:
            return effects + self._fail(out, refused, now_ns)
        out.target, out.from_block = "", 0
        return effects + self._lease(out, Step.LEASING, now_ns)  # renewed: all this took some of its time

    # epoch and room

    def _allot(self, out: Outgoing, now_ns: int) -> list[Effect]:
        desk = self._desk
        record = desk.surroundings.record(out.target)
        if record is None or out.submission is None:
            return self._fail(out, (KvRefusal.NO_TARGET, f"{out.target} is gone"), now_ns)
        desk.surroundings.promise(out.migration, out.target, wording.blocks_of(out, desk.limits))
        subject, body = desk.subjects.epoch(out.submission.ingress), wording.allot_of(out, record.incarnation)
        return self._ask(out, Step.ALLOTTING, subject, body, desk.limits.answer_ms * MS)

    def _on_allotted(self, out: Outgoing, body: EpochAllotted, now_ns: int) -> list[Effect]:
        out.target_epoch = body.epoch
        out.events.append(("epoch allotted", now_ns, {"epoch": body.epoch}))
        if out.mode is MigrationMode.RECOMPUTE:
            return self._freeze(out, now_ns)
        out.asked_target = True
        limits, subject = self._desk.limits, self._desk.subjects.migrate(out.target, "prepare")
        return self._ask(out, Step.PREPARING, subject, wording.prepare_of(out, limits), limits.answer_ms * MS)

    def _on_prepared(self, out: Outgoing, body: MigrationPrepared, now_ns: int) -> list[Effect]:
        out.matched_blocks, out.copier = body.matched_blocks, body.copier
        out.from_block = body.matched_blocks
        out.events.append(("prepared", now_ns, {"matched_blocks": body.matched_blocks, "copier": body.copier}))
        return self._next_round(out, now_ns)

    # rounds

    def _next_round(self, out: Outgoing, now_ns: int) -> list[Effect]:
        assert out.leased is not None
        leased = out.leased
        known_to = leased.from_block + len(leased.blocks)
        rounds_max = self._desk.limits.rounds_max if out.mode is MigrationMode.LIVE else 0
        new_blocks = max(0, known_to - out.from_block)
        if freeze_now(new_blocks=new_blocks, rounds=out.rounds, rounds_max=rounds_max):
            return self._freeze(out, now_ns)
        return self._pull(out, now_ns)

    def _pull(self, out: Outgoing, now_ns: int) -> list[Effect]:
        limits = self._desk.limits
        left_ns = out.lease_until_ns - now_ns
        read_ms = left_ns // MS - limits.margin_ms
        if read_ms <= 0:
            return self._fail(out, (KvRefusal.LEASE_LOST, "the lease was over before the round began"), now_ns)
        out.pulls += 1
        subject, body = self._desk.subjects.migrate(out.target, "pull"), wording.pull_of(out, limits, read_ms=read_ms)
        return self._ask(out, Step.PULLING, subject, body, left_ns)

    def _on_pulled(self, out: Outgoing, body: BlocksPulled, now_ns: int) -> list[Effect]:
        assert out.leased is not None
        out.from_block += body.blocks
        out.bytes += body.bytes
        out.descriptors += body.descriptors
        out.copier = body.copier or out.copier
        out.rounds += out.from_block >= out.leased.from_block + len(out.leased.blocks)
        fields = {"round": body.round, "blocks": body.blocks, "bytes": body.bytes, "descriptors": body.descriptors}
        out.events.append(("pulled", now_ns, fields | {"took_ms": body.duration_ns / 1e6}))
        return self._lease(out, Step.RENEWING, now_ns)

    def _on_renewed(self, out: Outgoing, body: KvLeased, now_ns: int) -> list[Effect]:
        out.leased = body
        return self._next_round(out, now_ns)

    # freeze and commit

    def _freeze(self, out: Outgoing, now_ns: int) -> list[Effect]:
        limits, subject = self._desk.limits, self._desk.subjects.engine(out.source, "freeze")
        freeze_ns = wording.freeze_ms_of(out, limits) * MS
        out.freeze_asked_ns, out.freeze_until_ns = now_ns, now_ns + freeze_ns
        return self._ask(out, Step.FREEZING, subject, wording.freeze_of(out, limits), freeze_ns)

    def _on_frozen(self, out: Outgoing, body: SequenceFrozen, now_ns: int) -> list[Effect]:
        out.frozen = body
        # The source's clock may be another machine's: what it says counts as far as it can be.
        out.stopped_ns = min(now_ns, max(out.freeze_asked_ns, body.frozen_ns))
        out.events.append(("frozen", now_ns, {"output_tokens": len(body.output_token_ids), "blocks": len(body.blocks)}))
        left_ns = out.freeze_until_ns - now_ns
        read_ms = left_ns // MS - self._desk.limits.margin_ms
        if read_ms <= 0:
            return self._fail(out, (KvRefusal.UNANSWERED, "the source stood still too late"), now_ns)
        recompute, subjects = out.mode is MigrationMode.RECOMPUTE, self._desk.subjects
        subject = subjects.engine(out.target, "submit") if recompute else subjects.migrate(out.target, "commit")
        return self._ask(out, Step.COMMITTING, subject, wording.commit_of(out, read_ms=read_ms), left_ns)

    def _on_committed(self, out: Outgoing, now_ns: int) -> list[Effect]:
        out.committed_ns, out.outcome = now_ns, MigrationOutcome.MOVED
        out.events.append(("committed", now_ns, {"frozen_ms": out.frozen_ns / 1e6}))
        return self._end(out)

    # the end

    def _fail(self, out: Outgoing, refused: Refused, now_ns: int) -> list[Effect]:
        """Gives up: the target is told, the lease is ended, and its answer says what became of the sequence."""
        out.outcome = judging.failed(out.step, refused[0])
        out.refusal, out.detail = refused
        effects = self._abort_target(out, refused)
        return effects + (self._finish(out, now_ns) if out.released else self._end(out))

    def _abort_target(self, out: Outgoing, refused: Refused) -> list[Effect]:
        if not out.asked_target:
            return []
        out.asked_target = False
        abort = AbortMigration(migration=out.migration, reason=refused[0], detail=refused[1])
        return [say(self._desk.subjects.migrate(out.target, "abort"), abort, out.sequence, out.span)]

    def _end(self, out: Outgoing) -> list[Effect]:
        out.ends_tried += 1
        subject, limits = self._desk.subjects.engine(out.source, "end"), self._desk.limits
        return self._ask(out, Step.ENDING, subject, wording.end_of(out), limits.answer_ms * MS)

    def _on_ended(self, out: Outgoing, body: Body | RequestFailure, now_ns: int) -> list[Effect]:
        if body is RequestFailure.TIMEOUT and out.ends_tried < ENDS_MAX:
            return self._end(out)
        out.outcome, why = judging.ended(out, body, now_ns)
        out.refusal, out.detail = why or (out.refusal, out.detail)
        out.released = True
        return self._finish(out, now_ns)

    def _finish(self, out: Outgoing, now_ns: int) -> list[Effect]:
        del self._open[out.migration]
        self._desk.surroundings.kept(out.migration, now_ns)
        timer = CancelTimer(name=f"{OUT}/{out.migration}")
        spent = spans.source_span(out, now_ns)
        return [timer, *self._tell(out, now_ns), *spent, *self.pump(out.source, now_ns)]

    def _tell(self, out: Outgoing, now_ns: int) -> list[Effect]:
        record = self._desk.surroundings.record(out.source)
        body = wording.finished(out, record.model if record is not None else "", now_ns)
        self._desk.metrics.finish(body)
        self.finished.append(body)
        answers = answer_all(out.waiters, body, out.sequence)
        if not body.model:
            return answers
        return [say(self._desk.subjects.migration(body.model), body, out.sequence, out.span), *answers]

    def abandon(self, now_ns: int) -> list[Effect]:
        """This process ends: every source is told to go on, and nobody waits in vain."""
        effects: list[Effect] = []
        for out in list(self._open.values()):
            refused = (KvRefusal.CANCELLED, "the migrator stops")
            if out.outcome is None:
                out.outcome, (out.refusal, out.detail) = MigrationOutcome.ABORTED, refused
                effects += self._abort_target(out, refused)
            if not out.released:
                subject = self._desk.subjects.engine(out.source, "end")
                effects.append(say(subject, wording.end_of(out), out.sequence, out.span))
            del self._open[out.migration]
            effects += self._tell(out, now_ns)
        return effects

    def check(self) -> None:
        """Bounds hold; what waits holds nothing."""
        for source in {out.source for out in self}:
            assert self.busy(source) <= self._desk.limits.out_max, "three out at a time"
            assert len(self.of(source)) <= self._desk.limits.queued_max
            assert len(self.moving(source)) == len(self.of(source)), "a sequence moves once at a time"
        for out in self:
            assert out.busy or out.released, f"{out.migration} waits with a lease"
            assert out.step is not Step.ENDING or out.outcome is not None
