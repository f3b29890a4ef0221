"""Shared worker context: sequence table, metrics, publishing of tokens."""

from __future__ import annotations

import random
from collections.abc import Iterable

from millrace.actor.effects import Effect, Publish, reply
from millrace.actor.engine import CancelInEngine
from millrace.contracts.ingress import FinishReason, ReturnReason
from millrace.contracts.leases import KvRefused
from millrace.contracts.message import Body
from millrace.contracts.sequences import request_id_of
from millrace.contracts.status import EngineDescription
from millrace.contracts.subjects import Subjects
from millrace.contracts.worker import RefusalReason, SequenceRefused

from services.worker import spans
from services.worker.config import WorkerLimits
from services.worker.identity import Identity
from services.worker.metrics import WorkerFigures
from services.worker.outbox import TokenOutbox
from services.worker.report_schedule import Reporter
from services.worker.state import Held, Ledger
from services.worker.step_budget import StepBudget

#: Acknowledgements come within a few hundred milliseconds where nothing was lost.
REMIND_NS = 1_000_000_000


class WorkerContext:
    """Sole writer of the ledger, with figures, reporter and outbox beside it.

    Attributes:
        ledger: Every sequence held.
        reporter: What is said about the instance; knows whether the bus is up.
    """

    def __init__(
        self,
        *,
        identity: Identity,
        info: EngineDescription,
        subjects: Subjects,
        limits: WorkerLimits,
        rng: random.Random,
    ) -> None:
        self.identity = identity
        self.ledger = Ledger()
        self.figures = WorkerFigures()
        self.reporter = Reporter(identity=identity, info=info, subjects=subjects, limits=limits)
        self._outbox = TokenOutbox(identity=identity, subjects=subjects, figures=self.figures)
        self.budget = StepBudget(info, identity.incarnation)
        self._subjects = subjects
        self._rng = rng

    def publish(self, touched: list[Held], *, step: int | None = None) -> list[Effect]:
        """Publish the unsent tokens of these sequences. While the bus is down they stay unsent, until ``repeat``."""
        if not touched or not self.reporter.bus_up:
            return []
        return self._outbox.tokens(touched, step=self.reporter.snapshot.step if step is None else step)

    def flush(self, held: Held) -> list[Effect]:
        """Everything of one sequence that has not been sent yet, in as many messages as it takes."""
        effects: list[Effect] = []
        while self.reporter.bus_up and held.sent < len(held.token_ids):
            effects += self.publish([held])
        return effects

    def repeat(self) -> list[Effect]:
        """Send again what may have been lost with the bus."""
        lately = [held for held in self.ledger if held.added and held.mark_older <= held.brought]
        moved = [effect for held in lately for effect in self.tell_moved(held)]
        return moved + self._outbox.repeat(self.ledger, step=self.reporter.snapshot.step)

    def tell_moved(self, held: Held) -> list[Effect]:
        """Tells ingress of a sequence that came by migration; nothing for any other one."""
        if held.moved is None or not self.reporter.bus_up:
            return []
        subject = self._subjects.moved(held.ingress)
        return [Publish(subject=subject, body=held.moved, request=request_id_of(held.sequence))]

    def remind(self, now_ns: int) -> list[Effect]:
        """Says again how sequences ended that nobody has acknowledged for a while: a last message that was lost is
        followed by no other one that would show it.
        """
        late = [h for h in self.ledger if h.finish_sent and now_ns - h.finished_ns >= REMIND_NS]
        return self._outbox.remind(late, step=self.reporter.snapshot.step)

    def finish(self, held: Held, finish: FinishReason, now_ns: int, detail: str = "") -> None:
        """Notes the end of a live sequence; its tokens stay."""
        self.reporter.gone(held)
        self.reporter.left(held, ended=finish is FinishReason.STOP)
        self.ledger.finish(held, finish, now_ns, detail)
        self.figures.finished[finish] += 1

    def remove(self, group: Iterable[Held], now_ns: int, outcome: str) -> list[Effect]:
        """Takes sequences out of the engine and forgets them; whoever still waits for an answer gets a refusal."""
        group = list(group)
        live = [held for held in group if held.live]
        effects: list[Effect] = [CancelInEngine(sequences=[held.sequence for held in live])] if live else []
        for held in group:
            self.reporter.gone(held)
            self.ledger.drop(held)
        for held in live:
            self.reporter.left(held)
            effects += self.spans(held, now_ns, outcome)
            effects += self.refuse(held, RefusalReason.STALE_EPOCH, outcome)
        return effects

    def moved(self, held: Held, now_ns: int) -> list[Effect]:
        """A sequence decodes on elsewhere: forgotten here, but for its fence. The engine has been told."""
        self.reporter.gone(held)
        self.reporter.left(held)
        self.ledger.drop(held)
        return self.spans(held, now_ns, spans.MOVED)

    def hand_back(self, live: list[Held], reason: ReturnReason) -> list[Effect]:
        """Tells their ingresses that these are theirs again."""
        return self._outbox.returned(live, reason)

    def refuse(self, held: Held, reason: RefusalReason, detail: str) -> list[Effect]:
        """Answers everybody who waits for the engine to take this sequence."""
        refused = SequenceRefused(sequence=held.sequence, epoch=held.epoch, reason=reason, detail=detail)
        return [effect for waiter in held.waiters for effect in answer(waiter, held.sequence, refused)]

    def refuse_kv(self, sequence: str, reply_to: str, refused: KvRefused) -> list[Effect]:
        """The answer to a migrator's question that the engine is not asked."""
        self.figures.kv_refused[refused.reason] += 1
        return answer(reply_to, sequence, refused)

    def spans(self, held: Held, end_ns: int, outcome: str) -> list[Effect]:
        """The spans of a sequence that ends here."""
        made = spans.sequence_spans(
            held,
            instance=self.identity.instance,
            end_ns=end_ns,
            outcome=outcome,
            rng=self._rng,
            bound=self.budget.since(held.received_ns),
        )
        return list(made)

    def reports(self, now_ns: int) -> list[Effect]:
        """Status and summary, where they are due."""
        return self.reporter.if_due(now_ns, self.figures.output_tokens)


def answer(reply_to: str, sequence: str, body: Body, traceparent: str = "") -> list[Effect]:
    """A reply where one is expected."""
    return reply(reply_to, body, request=request_id_of(sequence), traceparent=traceparent)
