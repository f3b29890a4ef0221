"""The submit handler: from SubmitSequence to the engine's answer."""

from __future__ import annotations

from millrace.actor.effects import Effect
from millrace.actor.engine import AddToEngine, EngineSequence, SequenceRejected
from millrace.contracts.ingress import FinishReason
from millrace.contracts.message import Message
from millrace.contracts.migration import SequenceMoved
from millrace.contracts.status import EngineDescription
from millrace.contracts.worker import RefusalReason, SequenceAccepted, SequenceRefused, SubmitSequence

from services.worker.context import WorkerContext, answer
from services.worker.reserving import Reserving
from services.worker.state import WAITERS_MAX, Held


class Intake:
    """Handles SubmitSequence: admit, reject, or answer a duplicate again. Stateless.

    Attributes:
        live_max: Bound of live sequences: running batch plus queue.
    """

    def __init__(self, ctx: WorkerContext, info: EngineDescription, reserving: Reserving, *, live_max: int) -> None:
        self._ctx = ctx
        self._reserving = reserving
        self._info = info
        self.live_max = live_max

    def submit(self, body: SubmitSequence, message: Message, now_ns: int, *, incarnation: int) -> list[Effect]:
        """Idempotent per (sequence, epoch); a newer epoch replaces the older one.

        Args:
            incarnation: Newest known of the asking ingress.
        """
        ledger, figures = self._ctx.ledger, self._ctx.figures
        held = ledger.get(body.sequence)
        if held is not None and held.epoch == body.epoch:
            return self._repeat_answer(held, message)
        refused_for = self._refusal(body, incarnation)
        if refused_for is not None:
            reason, detail = refused_for
            figures.refused[reason] += 1
            refused = SequenceRefused(sequence=body.sequence, epoch=body.epoch, reason=reason, detail=detail)
            return answer(message.reply_to, body.sequence, refused)
        replaced = self._ctx.remove([held], now_ns, "replaced by a newer epoch") if held is not None else []
        return replaced + self._admit(body, message, now_ns)

    def _refusal(self, body: SubmitSequence, incarnation: int) -> tuple[RefusalReason, str] | None:
        """Reason why a sequence is not taken, with a sentence; None where it is taken.

        Order of checks: first whether the asker is behind, then what another instance may still take, last what none
        will take.
        """
        ledger, max_model_len = self._ctx.ledger, self._info.max_model_len
        fence = ledger.fenced(body.sequence)
        if fence is not None and body.epoch <= fence:
            return RefusalReason.STALE_EPOCH, f"epoch {fence} is known here"
        if body.ingress_incarnation < incarnation:
            return RefusalReason.STALE_EPOCH, f"a newer incarnation of {body.ingress} is known here"
        if self._ctx.reporter.draining:
            return RefusalReason.DRAINING, "this worker takes no new work"
        if ledger.live >= self.live_max:
            return RefusalReason.FULL, f"{ledger.live} sequences, at most {self.live_max}"
        if body.epoch < 0 or not body.prompt_token_ids or not body.sequence or not body.ingress:
            return RefusalReason.INVALID, "epoch, prompt, sequence and ingress must be given"
        length = len(body.prompt_token_ids) + len(body.output_token_ids)
        if length >= max_model_len + (body.sampling.pooling is not None):
            return RefusalReason.TOO_LONG, f"{length} tokens leave no room below {max_model_len}"
        return None

    def _admit(self, body: SubmitSequence, message: Message, now_ns: int) -> list[Effect]:
        held = self._held(body, message, now_ns)
        self._ctx.ledger.admit(held)
        if 0 < held.max_tokens <= len(body.output_token_ids):
            # The break came between the last token and its finish reason: nothing is left to decode.
            accepted = self._reserving.drop_replicas(body.sequence, body.epoch) + self.added(held.sequence)
            self._ctx.finish(held, FinishReason.LENGTH, now_ns)
            return accepted + self._ctx.publish([held])
        self._ctx.reporter.submitted(held)
        handover, effects = self._reserving.claim_replica(body) if body.replica else self._reserving.claim(body)
        self._ctx.figures.recomputes += body.handover is not None and handover is None
        sequence = EngineSequence(
            sequence=body.sequence,
            prompt_token_ids=body.prompt_token_ids,
            sampling=body.sampling,
            output_token_ids=body.output_token_ids,
            arrival_ns=now_ns,
            expected_output_tokens=body.expected_output_tokens,
            handover=handover,
        )
        return [AddToEngine(sequence=sequence), *effects, *self._ctx.reports(now_ns)]

    def _held(self, body: SubmitSequence, message: Message, now_ns: int) -> Held:
        held = Held(
            sequence=body.sequence,
            epoch=body.epoch,
            ingress=body.ingress,
            ingress_incarnation=body.ingress_incarnation,
            traceparent=message.traceparent,
            prompt_tokens=len(body.prompt_token_ids),
            base_index=len(body.output_token_ids),
            max_tokens=body.sampling.max_tokens,
            received_ns=now_ns,
            deadline_ns=body.deadline_ns,
            submission=body,
            logprobs=[] if body.sampling.logprobs is not None else None,
            waiters=[message.reply_to] if message.reply_to else [],
        )
        migration = body.migration if body.handover is None else body.handover.migration
        if migration:
            self._bring(held, body, migration)
        return held

    def _bring(self, held: Held, body: SubmitSequence, migration: str) -> None:
        """Keeps what a migrated sequence brought, as far as it can be asked for again: it counts as sent, because it
        was, by whoever decoded it.
        """
        length = len(body.output_token_ids)
        if held.logprobs is None:
            held.base_index = 0
        else:
            held.logprobs = (body.output_logprobs or [])[-length:] if length else []
            held.base_index = length - len(held.logprobs)
        held.token_ids = body.output_token_ids[held.base_index :]
        held.sent = held.brought = held.mark_recent = held.mark_older = len(held.token_ids)
        held.moved = SequenceMoved(
            migration=migration,
            sequence=body.sequence,
            epoch=body.epoch,
            instance=self._ctx.identity.instance,
            incarnation=self._ctx.identity.incarnation,
            first_index=length,
        )

    def _repeat_answer(self, held: Held, message: Message) -> list[Effect]:
        if held.added:
            accepted = SequenceAccepted(sequence=held.sequence, epoch=held.epoch)
            return answer(message.reply_to, held.sequence, accepted)
        if message.reply_to and len(held.waiters) < WAITERS_MAX:
            held.waiters.append(message.reply_to)
        return []

    def added(self, sequence: str, kv_tokens: int = 0) -> list[Effect]:
        """The engine has it: everybody who waits learns so. ``kv_tokens``: as in SequenceAdded."""
        held = self._ctx.ledger.get(sequence)
        if held is None or held.added:
            return []  # cancelled meanwhile, or the earlier epoch's answer came late
        held.added = True
        self._ctx.figures.accepted += 1
        waiters, held.waiters = held.waiters, []
        accepted = SequenceAccepted(sequence=sequence, epoch=held.epoch, kv_tokens=kv_tokens)
        missed = held.submission is not None and bool(held.submission.replica) and not kv_tokens
        self._ctx.figures.replicas_missed += missed
        told = self._ctx.tell_moved(held)
        return told + [effect for waiter in waiters for effect in answer(waiter, sequence, accepted)]

    def rejected(self, body: SequenceRejected, now_ns: int) -> list[Effect]:
        """The engine refuses its parameters: gone again, and the same epoch may come with better ones."""
        held = self._ctx.ledger.get(body.sequence)
        if held is None or not held.live:
            return []
        if held.added:
            self._ctx.finish(held, FinishReason.ERROR, now_ns, body.detail)
            return self._ctx.publish([held])
        self._ctx.reporter.gone(held)
        self._ctx.ledger.retract(held)
        self._ctx.figures.refused[RefusalReason.INVALID] += 1
        return self._ctx.refuse(held, RefusalReason.INVALID, body.detail)
