"""From the engine's steps to the ingresses: tokens kept, told, asked for again, and acknowledged."""

from __future__ import annotations

from millrace.actor.effects import Effect
from millrace.actor.engine import EngineStepped, StepOutput
from millrace.contracts.ingress import TokensResent
from millrace.contracts.message import ErrorReply, Message
from millrace.contracts.worker import AcknowledgeSequences, ResendTokens

from services.worker.context import WorkerContext, answer
from services.worker.state import Held


class Decoding:
    """Takes what the engine decoded; keeps nothing but the ctx it works on."""

    def __init__(self, ctx: WorkerContext) -> None:
        self._ctx = ctx

    def stepped(self, body: EngineStepped, now_ns: int) -> list[Effect]:
        """One step's outputs and, where there is one, its snapshot."""
        ctx = self._ctx
        touched: list[Held] = []
        ended: list[Held] = []
        find, at_ns = ctx.ledger.get, body.at_ns or now_ns
        for output in body.outputs:
            held = find(output.sequence)
            if held is None or held.finish is not None:
                ctx.figures.late_outputs += 1
                continue
            self._take_output(held, output, at_ns)
            touched.append(held)
            if output.finish is not None:
                ended.append(held)
        if body.snapshot is not None:
            ctx.figures.stepped(ctx.reporter.snapshot, body.snapshot)
            ctx.reporter.take(body.snapshot)
        effects = ctx.publish(touched, step=body.step)
        for held in ended:
            effects += ctx.spans(held, held.finished_ns, str(held.finish))
        return effects + ctx.reports(now_ns)

    def _take_output(self, held: Held, output: StepOutput, at_ns: int) -> None:
        figures = self._ctx.figures
        if output.scheduled_ns and not held.scheduled_ns:
            held.scheduled_ns = output.scheduled_ns
        if output.cached_tokens is not None:
            held.cached_tokens = output.cached_tokens
        if output.prompt_logprobs is not None:
            held.prompt_logprobs = output.prompt_logprobs
        if output.pooled is not None:
            held.pooled = output.pooled
        token_ids = output.token_ids
        if output.preemptions > held.preemptions:
            held.preemptions = output.preemptions
        if token_ids and not held.first_token_ns:
            held.first_token_ns = at_ns
            if held.moved is None:
                figures.first_token(held)
        held.token_ids += token_ids
        if held.logprobs is not None:
            held.logprobs.extend(output.logprobs or [])
        figures.output_tokens += len(token_ids)
        if output.finish is not None:
            self._ctx.finish(held, output.finish, at_ns)

    def resend(self, body: ResendTokens, message: Message) -> list[Effect]:
        """Tokens that an ingress misses."""
        held = self._ctx.ledger.get(body.sequence)
        if held is None or held.epoch != body.epoch:
            return answer(message.reply_to, body.sequence, ErrorReply(reason="forgotten"))
        start = min(max(body.from_index - held.base_index, 0), len(held.token_ids))
        return answer(message.reply_to, body.sequence, TokensResent(chunk=held.chunk(start)))

    def acknowledge(self, body: AcknowledgeSequences) -> list[Effect]:
        """Finished sequences whose every token has arrived are forgotten."""
        ledger = self._ctx.ledger
        for sequence, epoch in body.sequences:
            held = ledger.get(sequence)
            if held is not None and held.epoch <= epoch and not held.live:
                ledger.drop(held)
        return []
