"""Migrations away from our instances: who may begin, who waits, who hears of the end.

    QUEUED → (RESTING → QUEUED)* → the handshake (outgoing_steps.py) → gone

A migration takes one of its instance's slots while its handshake is under way; before it, it holds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from millrace.actor.effects import CancelTimer, Effect, StartTimer
from millrace.contracts.kv import KvRefusal
from millrace.contracts.local import RequestFailure
from millrace.contracts.message import Body
from millrace.contracts.migration import (
    MigrateSequence,
    MigrationFinished,
    MigrationOutcome,
)
from millrace.kvcache.chain import unpack_hashes

from services.migrator import messages, outcomes, spans
from services.migrator.cluster_view import LISTEN_NS
from services.migrator.context import MS, OUT, MigratorContext, answer_all, say
from services.migrator.orders import FinishedOrders
from services.migrator.outcomes import Refusal
from services.migrator.outgoing_steps import OutgoingDriver
from services.migrator.state import OutgoingMigration, OutgoingStep, asked_for


class OutgoingMigrations:
    """Owns every migration away from the instances of one actor.

    Attributes:
        finished: Migrations that ended with the last message, for whoever wanted them; taken by the actor.
    """

    def __init__(self, context: MigratorContext) -> None:
        self._context = context
        self._driver = OutgoingDriver(context, self)
        self._open: dict[str, OutgoingMigration] = {}
        self._finished_orders = FinishedOrders()
        self.finished: list[MigrationFinished] = []

    def __iter__(self) -> Iterator[OutgoingMigration]:
        return iter(self._open.values())

    def of(self, instance: str) -> list[OutgoingMigration]:
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
        """Somebody wants a sequence moved. One that moves already is joined; an order that is done is not repeated."""
        done = self._finished_orders.find(body.sequence, body.order)
        if done is not None:
            return answer_all([reply_to] if reply_to else [], done, body.sequence)
        known = next((o for o in self.of(source) if o.sequence == body.sequence), None)
        if known is not None and known.join(body, reply_to):
            return []
        out = asked_for(self._name(), source, body, body.mode or self._context.config.mode, now_ns)
        out.join(body, reply_to)
        refused = known.refusal_to_join(body) if known is not None else self._forbidden(out)
        if refused is not None:
            out.outcome, (out.refusal, out.detail) = MigrationOutcome.REFUSED, refused
            return self._tell(out, now_ns)
        self._open[out.migration] = out
        return self.pump(source, now_ns)

    def _name(self) -> str:
        return f"{self._context.rng.getrandbits(48):012x}"

    def _forbidden(self, out: OutgoingMigration) -> Refusal | None:
        """Reason not to try the migration at all."""
        view = self._context.cluster_view
        source, waiting = view.record(out.source), len(self.of(out.source))
        if source is None or source.kv is None:
            return outcomes.wrong_source(out, source)
        if waiting >= self._context.limits.queued_max:
            return KvRefusal.TOO_MANY, f"{waiting} are under way or wait"
        return outcomes.wrong_target(out, source, view.record(out.wanted)) if out.wanted else None

    # slots

    def pump(self, source: str, now_ns: int) -> list[Effect]:
        """Begins what waits, as far as slots are free; the oldest first."""
        effects: list[Effect] = []
        for out in self.of(source):
            if out.step is OutgoingStep.QUEUED:
                if self.busy(source) >= self._context.limits.out_max:
                    return effects
                effects += self._begin(out, now_ns)
        return effects

    def _begin(self, out: OutgoingMigration, now_ns: int) -> list[Effect]:
        listening = [] if out.wanted else self._listen(out, now_ns)
        if out.step is OutgoingStep.RESTING:
            return listening
        out.started_ns = out.started_ns or now_ns
        return listening + self._driver.begin(out, now_ns)

    def _listen(self, out: OutgoingMigration, now_ns: int) -> list[Effect]:
        """Whoever shall choose a target must have heard of them; it holds neither slot nor lease until then."""
        view = self._context.cluster_view
        record = view.record(out.source)
        if record is None:
            return []
        effects = view.listen_to_model(record.model, now_ns)
        heard_ns = (view.heard_since(record.model) or now_ns) + LISTEN_NS
        if now_ns < heard_ns:
            out.step = OutgoingStep.RESTING
            effects.append(StartTimer(name=f"{OUT}/{out.migration}", at_ns=heard_ns))
        return effects

    def rest(self, out: OutgoingMigration, refused: Refusal, now_ns: int) -> list[Effect]:
        """It cannot move yet: its slot is free meanwhile."""
        pause_ns = self._context.limits.retry_ms * MS
        if now_ns + pause_ns >= out.begin_until_ns:
            return self._driver.fail(out, refused, now_ns)
        out.step, out.released = OutgoingStep.RESTING, True
        return [StartTimer(name=f"{OUT}/{out.migration}", at_ns=now_ns + pause_ns), *self.pump(out.source, now_ns)]

    def on_timer(self, migration: str, now_ns: int) -> list[Effect]:
        """A rest is over."""
        out = self._open.get(migration)
        if out is None or out.step is not OutgoingStep.RESTING:
            return []
        out.step = OutgoingStep.QUEUED
        return self.pump(out.source, now_ns)

    def on_answer(
        self, migration: str, number: int, body: Body | RequestFailure, traceparent: str, now_ns: int
    ) -> list[Effect]:
        """The answer to a migration's last question, or that there is none; what is older says nothing any more."""
        out = self._open.get(migration)
        if out is None or number != out.number:
            return []
        return self._driver.on_answer(out, body, traceparent, now_ns)

    # the end

    def rename(self, out: OutgoingMigration) -> list[Effect]:
        """Another target is another migration for everybody else: the old one is over, also at the source."""
        over = messages.end_of(out)
        del self._open[out.migration]
        self._context.cluster_view.broken(out.migration)
        out.migration, out.target, out.from_block = self._name(), "", 0
        self._open[out.migration] = out
        return [say(self._context.subjects.engine(out.source, "end"), over, out.sequence, out.span)]

    def finish(self, out: OutgoingMigration, now_ns: int) -> list[Effect]:
        """Over: whoever waits hears so, and its slot is free."""
        del self._open[out.migration]
        self._context.cluster_view.kept(out.migration, now_ns)
        timer = CancelTimer(name=f"{OUT}/{out.migration}")
        spent = spans.source_span(out, now_ns)
        return [timer, *self._tell(out, now_ns), *spent, *self.pump(out.source, now_ns)]

    def _tell(self, out: OutgoingMigration, now_ns: int) -> list[Effect]:
        record = self._context.cluster_view.record(out.source)
        body = messages.finished(out, record.model if record is not None else "", now_ns)
        self._context.metrics.finish(body)
        if self._context.policy.weighs_pairs and body.block_hashes:
            self._context.pairs.moved(body.target, unpack_hashes(body.block_hashes))
        self.finished.append(body)
        self._finished_orders.keep(body)
        answers = answer_all(out.waiters, body, out.sequence)
        if not body.model:
            return answers
        return [say(self._context.subjects.migration(body.model), body, out.sequence, out.span), *answers]

    def abandon(self, now_ns: int) -> list[Effect]:
        """This process ends: every source is told to go on, and nobody waits in vain."""
        effects: list[Effect] = []
        for out in list(self._open.values()):
            refused = (KvRefusal.CANCELLED, "the migrator stops")
            if out.outcome is None:
                out.outcome, (out.refusal, out.detail) = MigrationOutcome.ABORTED, refused
                effects += self._driver.abort_target(out)
            # While a target may be reading, its source stays as it is; it goes on by its own deadline.
            if out.step is not OutgoingStep.COMMITTING:
                effects += self._driver.release(out)
            del self._open[out.migration]
            effects += self._tell(out, now_ns)
        return effects

    def check(self) -> None:
        """Bounds hold; what waits holds nothing."""
        for source in {out.source for out in self}:
            assert self.busy(source) <= self._context.limits.out_max, "three out at a time"
            assert len(self.of(source)) <= self._context.limits.queued_max
            assert len(self.moving(source)) == len(self.of(source)), "a sequence moves once at a time"
        for out in self:
            assert out.busy or out.released, f"{out.migration} waits with a lease"
