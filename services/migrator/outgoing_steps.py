"""The steps of an outgoing migration: what each one asks, and which step each answer leads to.

    LEASING → ALLOTTING → PREPARING → (PULLING* → FREEZING)* → COMMITTING

PREPARING reads the first blocks as well; FREEZING is answered with the new full blocks instead where another round
pays. RENEWING comes before a read for which too little of the lease is left. Each step waits for one answer and ends at
its deadline at the latest. What fails before the freeze is REFUSED, what fails after it is ABORTED; in both cases the
target is told, the lease is ended, and the source decodes on. With ``recompute`` nothing is prepared.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
from millrace.actor.effects import Effect
from millrace.contracts.kv import KvRefusal
from millrace.contracts.leases import (
    KvLeased,
    KvPulled,
    KvRefused,
    MigrationPrepared,
    SequenceFrozen,
    UnreserveKv,
)
from millrace.contracts.local import RequestFailure
from millrace.contracts.message import Body
from millrace.contracts.migration import EpochAllotted, MigrationMode, MigrationOutcome, MigrationReason
from millrace.contracts.worker import SequenceAccepted
from millrace.policies.migration import TargetQuestion, Wish

from services.migrator import messages, outcomes, spans
from services.migrator.context import MS, OUT, Ask, MigratorContext, ask, refusal_of, say
from services.migrator.outcomes import Refusal
from services.migrator.state import OutgoingMigration, OutgoingStep

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

#: A pull shall take this part of a lease.
LEASE_SHARE = 4


class Owner(Protocol):
    """Component that keeps the migrations."""

    def rest(self, out: OutgoingMigration, refused: Refusal, now_ns: int) -> list[Effect]:
        """It cannot move yet: again later, or never."""
        ...

    def rename(self, out: OutgoingMigration) -> list[Effect]:
        """It goes on as another migration, to another target."""
        ...

    def finish(self, out: OutgoingMigration, now_ns: int) -> list[Effect]:
        """It is over; nothing is pinned or reserved for it any more."""
        ...


class OutgoingDriver:
    """Asks each step's question and acts on its answer, for all outgoing migrations; keeps none of them."""

    def __init__(self, context: MigratorContext, owner: Owner) -> None:
        self._context = context
        self._owner = owner

    def begin(self, out: OutgoingMigration, now_ns: int) -> list[Effect]:
        """The first question."""
        return self._lease(out, OutgoingStep.LEASING, now_ns)

    # asking and hearing

    def _ask(
        self, out: OutgoingMigration, step: OutgoingStep, subject: str, body: Body, timeout_ns: int
    ) -> list[Effect]:
        out.step = step
        out.number += 1
        submits = step is OutgoingStep.COMMITTING
        about = (out.sequence, (out.target_span if submits else "") or out.span)
        question = Ask(subject=subject, body=body, timeout_ns=timeout_ns, about=about)
        return [ask(OUT, out.migration, out.number, question)]

    def on_answer(
        self, out: OutgoingMigration, body: Body | RequestFailure, traceparent: str, now_ns: int
    ) -> list[Effect]:
        """The answer to its last question, or that there is none."""
        match out.step, body:
            case OutgoingStep.LEASING, KvLeased():
                return self._on_leased(out, body, traceparent, now_ns)
            case OutgoingStep.RENEWING, KvLeased():
                return self._on_renewed(out, body, now_ns)
            case OutgoingStep.ALLOTTING, EpochAllotted():
                return self._on_allotted(out, body, now_ns)
            case OutgoingStep.PREPARING, MigrationPrepared():
                return self._on_prepared(out, body, now_ns)
            case OutgoingStep.PULLING, KvPulled():
                return self._on_pulled(out, body, now_ns)
            case OutgoingStep.FREEZING, KvLeased():
                out.lease_until_ns = out.freeze_asked_ns + self._context.limits.lease_ms * MS
                return self._on_renewed(out, body, now_ns)
            case OutgoingStep.FREEZING, SequenceFrozen():
                return self._on_frozen(out, body, now_ns)
            case OutgoingStep.COMMITTING, SequenceAccepted():
                return self._on_committed(out, now_ns)
            case _:
                return self._on_no(out, body, now_ns)

    def _on_no(self, out: OutgoingMigration, body: Body | RequestFailure, now_ns: int) -> list[Effect]:
        """Everything that is not the answer that was wanted."""
        refused = refusal_of(body, str(out.step))
        if out.step is OutgoingStep.LEASING and isinstance(body, KvRefused):
            out.released = True
            if refused[0] in LATER:
                return self._owner.rest(out, refused, now_ns)
        if out.step is OutgoingStep.PREPARING and refused[0] in ELSEWHERE:
            return self._try_elsewhere(out, refused, now_ns)
        return self.fail(out, refused, now_ns)

    # lease

    def _lease(self, out: OutgoingMigration, step: OutgoingStep, now_ns: int) -> list[Effect]:
        limits = self._context.limits
        out.lease_until_ns, out.released = now_ns + limits.lease_ms * MS, False
        subject = self._context.subjects.engine(out.source, "lease")
        return self._ask(out, step, subject, messages.lease_of(out, limits), limits.answer_ms * MS)

    def _on_leased(self, out: OutgoingMigration, body: KvLeased, traceparent: str, now_ns: int) -> list[Effect]:
        if body.submission is None or body.endpoint is None:
            return self.fail(out, (KvRefusal.INVALID, "the lease does not tell the submission"), now_ns)
        if not out.span:  # one that was tried elsewhere before has its own already
            out.traceparent, out.span = traceparent, spans.below(traceparent, self._context.rng)
        self._note_lease(out, now_ns)
        out.epoch, out.leased, out.submission, out.endpoint = body.epoch, body, body.submission, body.endpoint
        out.events.append(("leased", now_ns, {"blocks": len(body.blocks), "epoch": body.epoch}))
        if out.wanted:
            out.target = out.wanted
            return self._allot(out, now_ns)
        return self._choose(out, now_ns)

    def _note_lease(self, out: OutgoingMigration, now_ns: int) -> None:
        """Note how long its engine took to answer: stopping will take about as long."""
        out.slow_ns = max(out.slow_ns, now_ns - (out.lease_until_ns - self._context.limits.lease_ms * MS))

    # target

    def _choose(self, out: OutgoingMigration, now_ns: int) -> list[Effect]:
        context = self._context
        question = self._question(out, now_ns)
        if question is None:
            return self.fail(out, (KvRefusal.UNABLE, f"{out.source} is not registered any more"), now_ns)
        decision = context.policy.decide(question, context.parameters, now_ns, context.rng)
        if decision.chosen is None:
            notes = ", ".join(f"{score.name}: {score.note}" for score in decision.scores)
            return self.fail(out, (KvRefusal.NO_TARGET, notes or decision.reason), now_ns)
        out.target = decision.chosen
        out.events.append(("target chosen", now_ns, {"target": out.target, "why": decision.reason}))
        return self._allot(out, now_ns)

    def _question(self, out: OutgoingMigration, now_ns: int) -> TargetQuestion | None:
        """Question for the target policy; None where the source is gone."""
        view = self._context.cluster_view
        source = view.record(out.source)
        if source is None:
            return None
        wish = Wish(
            source=source,
            blocks=messages.blocks_of(out, self._context.limits),
            recompute=out.mode is MigrationMode.RECOMPUTE,
            excluded=frozenset(out.excluded),
        )
        question = view.question(out.sequence, wish, now_ns, handoff=out.reason is MigrationReason.HANDOFF)
        if not self._context.policy.weighs_pairs:
            return question
        records = {each.name: record for each in question.candidates if (record := view.record(each.name)) is not None}
        known = self._context.pairs.told(question, source, records, messages.prompt_hashes(out))
        return msgspec.structs.replace(
            known,
            blocks_held=len(out.leased.blocks) if out.leased is not None else 0,
            block_bytes=source.kv.block_bytes if source.kv is not None else 0,
            rest_tokens=messages.rest_of(out),
        )

    def _try_elsewhere(self, out: OutgoingMigration, refused: Refusal, now_ns: int) -> list[Effect]:
        out.excluded.add(out.target)
        effects = self.abort_target(out)
        out.events.append(("target refused", now_ns, {"target": out.target, "why": str(refused[0])}))
        others = None if out.wanted else self._question(out, now_ns)
        # Where nobody else could take it the source is not leased once more to find that out.
        if others is None or not others.candidates or len(out.excluded) >= self._context.limits.targets_max:
            return effects + self.fail(out, refused, now_ns)
        return [*effects, *self._owner.rename(out), *self._lease(out, OutgoingStep.LEASING, now_ns)]

    # epoch and room

    def _allot(self, out: OutgoingMigration, now_ns: int) -> list[Effect]:
        context = self._context
        record = context.cluster_view.record(out.target)
        if record is None or out.submission is None:
            return self.fail(out, (KvRefusal.NO_TARGET, f"{out.target} is gone"), now_ns)
        context.cluster_view.promise(out.migration, out.target, messages.blocks_of(out, context.limits))
        subject, body = context.subjects.epoch(out.submission.ingress), messages.allot_of(out, record.incarnation)
        return self._ask(out, OutgoingStep.ALLOTTING, subject, body, context.limits.answer_ms * MS)

    def _on_allotted(self, out: OutgoingMigration, body: EpochAllotted, now_ns: int) -> list[Effect]:
        out.target_epoch, out.target_span = body.epoch, body.traceparent
        if not out.span:
            out.traceparent, out.span = body.traceparent, spans.below(body.traceparent, self._context.rng)
        out.events.append(("epoch allotted", now_ns, {"epoch": body.epoch}))
        return self._freeze(out, now_ns) if out.mode is MigrationMode.RECOMPUTE else self._prepare(out, now_ns)

    def _prepare(self, out: OutgoingMigration, now_ns: int) -> list[Effect]:
        limits, left_ns = self._context.limits, out.lease_until_ns - now_ns
        if out.step is not OutgoingStep.RENEWING and left_ns < limits.lease_ms * MS // 2:
            return self._lease(out, OutgoingStep.RENEWING, now_ns)  # slow answers took the rest of it
        read_ms = (left_ns - limits.margin_ms * MS) // MS
        if read_ms <= 0:
            return self.fail(out, (KvRefusal.LEASE_LOST, "the lease was over before the round began"), now_ns)
        out.asked_target, out.target_asked_ns = True, now_ns
        body, subject = messages.prepare_of(out, limits, read_ms=read_ms), self._engine(out.target, "prepare")
        return self._ask(out, OutgoingStep.PREPARING, subject, body, max(left_ns, limits.answer_ms * MS))

    def _on_prepared(self, out: OutgoingMigration, body: MigrationPrepared, now_ns: int) -> list[Effect]:
        assert out.leased is not None
        out.matched_blocks = out.from_block = body.matched_blocks
        out.reserved_blocks = messages.blocks_of(out, self._context.limits)
        out.round_to = min(len(out.leased.blocks), out.reserved_blocks)
        out.ahead_ns = None  # another target's clock would say nothing
        fields = {"matched_blocks": body.matched_blocks, "copier": str(body.copier)}
        out.events.append(("prepared", now_ns, fields))
        out.rounds = int(body.blocks > 0)
        out.slow_ns = max(out.slow_ns, now_ns - out.target_asked_ns - body.duration_ns)
        if not body.blocks:
            out.copier = str(body.copier)
            messages.note_clock(out, body.at_ns, now_ns)
            return self._freeze(out, now_ns)
        self._note_read(out, body, now_ns)
        return self._next(out, now_ns)

    # rounds

    def _next(self, out: OutgoingMigration, now_ns: int) -> list[Effect]:
        """The rest of this round, or its end."""
        return self._pull(out, now_ns) if out.from_block < out.round_to else self._freeze(out, now_ns)

    def _pull(self, out: OutgoingMigration, now_ns: int) -> list[Effect]:
        limits = self._context.limits
        left_ns = out.lease_until_ns - now_ns
        if out.step is not OutgoingStep.RENEWING and left_ns < limits.lease_ms * MS // 2:
            return self._lease(out, OutgoingStep.RENEWING, now_ns)  # slow answers took the rest of it
        read_ms = (left_ns - limits.margin_ms * MS) // MS
        if read_ms <= 0:
            return self.fail(out, (KvRefusal.LEASE_LOST, "the lease was over before the round began"), now_ns)
        out.target_asked_ns = now_ns
        body = messages.pull_of(out, limits, read_ms=read_ms)
        return self._ask(out, OutgoingStep.PULLING, self._engine(out.target, "pull"), body, left_ns)

    def _on_pulled(self, out: OutgoingMigration, body: KvPulled, now_ns: int) -> list[Effect]:
        self._note_read(out, body, now_ns)
        return self._next(out, now_ns)

    def _note_read(self, out: OutgoingMigration, body: MigrationPrepared | KvPulled, now_ns: int) -> None:
        out.from_block += body.blocks
        out.bytes += body.bytes
        out.descriptors += body.descriptors
        out.copier = str(body.copier) or out.copier
        messages.note_clock(out, body.at_ns, now_ns)
        # As much as takes a quarter of a lease, at the speed of this one, messages included.
        lease_ns, took_ns = self._context.limits.lease_ms * MS, max(1, now_ns - out.target_asked_ns)
        out.pull_bytes = max(1, body.bytes * lease_ns // (LEASE_SHARE * took_ns))
        view = self._context.cluster_view
        source, target = view.record(out.source), view.record(out.target)
        if source is not None and target is not None:
            self._context.pairs.pulled(source, target, body.bytes, took_ns)
        fields = {"round": out.rounds, "blocks": body.blocks, "bytes": body.bytes, "descriptors": body.descriptors}
        out.events.append(("pulled", now_ns, fields | {"took_ms": body.duration_ns / 1e6}))

    def _on_renewed(self, out: OutgoingMigration, body: KvLeased, now_ns: int) -> list[Effect]:
        """The lease goes on; asked for a freeze, the source had more to read first."""
        renewed = out.step is OutgoingStep.RENEWING
        out.leased = body
        if renewed:
            self._note_lease(out, now_ns)
            return self._prepare(out, now_ns) if not out.asked_target else self._pull(out, now_ns)
        out.rounds += 1
        out.round_to = min(body.from_block + len(body.blocks), out.reserved_blocks)
        return self._next(out, now_ns)

    # freeze and commit

    def _freeze(self, out: OutgoingMigration, now_ns: int) -> list[Effect]:
        limits, subject = self._context.limits, self._context.subjects.engine(out.source, "freeze")
        freeze_ns = messages.freeze_ms_of(out, limits) * MS
        out.freeze_asked_ns, out.freeze_until_ns = now_ns, now_ns + freeze_ns
        return self._ask(out, OutgoingStep.FREEZING, subject, messages.freeze_of(out, limits), freeze_ns)

    def _on_frozen(self, out: OutgoingMigration, body: SequenceFrozen, now_ns: int) -> list[Effect]:
        out.frozen = body
        # The source's clock may be another machine's: what it says counts as far as it can be.
        out.stopped_ns = min(now_ns, max(out.freeze_asked_ns, body.frozen_ns))
        out.events.append(("frozen", now_ns, {"output_tokens": len(body.output_token_ids), "blocks": len(body.blocks)}))
        left_ns = out.freeze_until_ns - now_ns
        ends_ns = out.freeze_until_ns - self._context.limits.margin_ms * MS
        read_ms = (ends_ns - now_ns) // MS
        if read_ms <= 0:
            return self.fail(out, (KvRefusal.UNANSWERED, "the source stood still too late"), now_ns)
        commit = messages.commit_of(out, read_ms=read_ms, until_ns=messages.until_of(out, ends_ns))
        return self._ask(out, OutgoingStep.COMMITTING, self._engine(out.target, "submit"), commit, left_ns)

    def _on_committed(self, out: OutgoingMigration, now_ns: int) -> list[Effect]:
        out.committed_ns, out.outcome = now_ns, MigrationOutcome.MOVED
        out.events.append(("committed", now_ns, {"frozen_ms": out.frozen_ns / 1e6}))
        return [*self.release(out), *self._owner.finish(out, now_ns)]

    # the end

    def fail(self, out: OutgoingMigration, refused: Refusal, now_ns: int) -> list[Effect]:
        """Gives up: the target is told, and the lease is ended."""
        out.outcome = outcomes.failed(out.step, refused[0])
        out.refusal, out.detail = refused
        return [*self.abort_target(out), *self.release(out), *self._owner.finish(out, now_ns)]

    def abort_target(self, out: OutgoingMigration) -> list[Effect]:
        """Frees what the target has reserved, where it was asked for anything."""
        if not out.asked_target:
            return []
        out.asked_target = False
        over = UnreserveKv(migration=out.migration)
        return [say(self._engine(out.target, "unreserve"), over, out.sequence, out.span)]

    def release(self, out: OutgoingMigration) -> list[Effect]:
        """Lets the source's sequence go, or go on."""
        if out.released:
            return []
        out.released = True
        return [say(self._engine(out.source, "end"), messages.end_of(out), out.sequence, out.span)]

    def _engine(self, instance: str, verb: str) -> str:
        return self._context.subjects.engine(instance, verb)
