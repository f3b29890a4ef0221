"""Questions to a judging model of this cluster: child calls of the answer that is judged.

The question about attempt ``r~1`` is the call ``r~j1`` with a prompt for each choice of the answer. It is dispatched,
traced and charged as part of its parent's call, has its priority, and ends with it.

| event | consequence |
|---|---|
| an answer is complete, and the plan's judge is a model | TokenizeQuestion |
| QuestionTokenized | the child call begins; without an instance, or where it is too long, there is no verdict |
| the child call completes | its likeliest first tokens go to the judge (JudgeAnswer), which makes a score of them |
| it fails, or is not done in ``judge_timeout_s`` | no verdict: confidence decides |
| the client leaves, or the parent ends otherwise | it is cancelled |
"""

from __future__ import annotations

import msgspec
from millrace.contracts.worker import Sampling
from millrace.judging.question import judging_question
from millrace.telemetry.tracecontext import child, format_traceparent, sampled_context

from services.ingress.calls.admission import open_call, too_long
from services.ingress.calls.completion import abandon
from services.ingress.calls.limits import Refusal
from services.ingress.calls.messages import (
    Call,
    CallKind,
    CascadeOptions,
    ChoiceDelta,
    QuestionTokenized,
    TokenizeQuestion,
)
from services.ingress.calls.open_call import OpenCall
from services.ingress.cascade.lifecycle import OpinionGiven, Opinions
from services.ingress.cascade.open_cascade import Attempt, OpenCascade
from services.ingress.dispatch.dispatcher import dispatch_new
from services.ingress.pending import PendingJudgeQuestion
from services.ingress.state import IngressState
from services.ingress.times import SECOND_NS

#: First tokens of a verdict that are looked at: as many as engines tell.
TOP_TOKENS = 20

#: One token that is not the end of the text, the likeliest ones told.
VERDICT = Sampling(max_tokens=1, min_tokens=1, temperature=0.0, logprobs=TOP_TOKENS)


class QuestionListener:
    """Parent's ear at the question. The end is handled after the message that caused it."""

    is_client = False

    def __init__(self, state: IngressState, parent: OpenCascade, attempt: Attempt) -> None:
        self._state = state
        self._parent = parent
        self._attempt = attempt
        self._opinions: list[list[tuple[str, float]]] = [[] for _ in range(parent.choices)]

    def on_accepted(self, call: OpenCall) -> None:
        """Nothing: the client has nothing of it."""

    def on_tokens(self, call: OpenCall) -> None:
        """Nothing: it has one token."""

    def on_deltas(self, call: OpenCall, deltas: list[ChoiceDelta]) -> None:
        for delta in deltas:
            if delta.logprobs and not self._opinions[delta.index]:
                self._opinions[delta.index] = [(text, value) for text, value, _ in delta.logprobs[0].top]

    def on_completed(self, call: OpenCall) -> None:
        self._tell(self._opinions)

    def on_failed(self, call: OpenCall, refusal: Refusal) -> None:
        self._tell([])

    def give_up(self) -> None:
        """The question cannot be asked."""
        self._tell([])

    def _tell(self, opinions: Opinions) -> None:
        self._parent.events.append((self._attempt, OpinionGiven(opinions)))
        self._state.unsettled[self._parent.request] = self._parent


def judging_model(parent: OpenCascade) -> str:
    """Model of this cluster that judges by the plan in force; empty for none."""
    plan = parent.served.plan
    return plan.judge_tier.model if plan.judge == "llm" and plan.judge_tier is not None else ""


def ask_model(state: IngressState, parent: OpenCascade, model: str) -> None:
    """Have the question about the current attempt's answer tokenised."""
    attempt = parent.attempt
    limit_ns = int(parent.served.config.judge_timeout_s * SECOND_NS)
    parent.judge_by_ns = min(state.now_ns + limit_ns, parent.deadline_ns)
    parent.asking = state.correlation("question", PendingJudgeQuestion(parent, attempt))
    prompt = parent.members[attempt.model].prompt
    texts = [judging_question(prompt, answer) for answer in attempt.texts()]
    state.emit(TokenizeQuestion(correlation=parent.asking, model=model, texts=texts))


def take_question(state: IngressState, body: QuestionTokenized) -> None:
    """Start the child call, unless its parent has ended meanwhile."""
    pending = state.pending.pop(body.correlation, None)
    if not isinstance(pending, PendingJudgeQuestion):
        return
    parent, attempt = pending.cascade, pending.attempt
    parent.asking = ""
    listener = QuestionListener(state, parent, attempt)
    if not body.prompts or not state.cluster.usable(body.model) or state.now_ns >= parent.judge_by_ns:
        listener.give_up()
        return
    call = _child(state, parent, body)
    if too_long(state, call) is not None:
        listener.give_up()
        return
    attempt.question = open_call(state, call, listener)
    dispatch_new(state, attempt.question)


def withdraw_question(state: IngressState, parent: OpenCascade, reason: str) -> None:
    """Cancel an open question: nobody waits for it any more."""
    question = parent.attempts[-1].question if parent.attempts else None
    if question is not None and question.request in state.calls:
        abandon(state, question, reason)


def _child(state: IngressState, parent: OpenCascade, body: QuestionTokenized) -> Call:
    """The call of the judge's model; its trace is a child of the attempt's."""
    attempt = parent.attempt
    trace = sampled_context(attempt.span)
    return msgspec.structs.replace(
        parent.call,
        request=f"{parent.request}~j{len(parent.attempts)}",
        parent=parent.request,
        kind=CallKind.CHAT,
        model=body.model,
        prompts=body.prompts,
        prompt_head="",
        sampling=VERDICT,
        n=1,
        stop=[],
        include_stop=False,
        skip_special_tokens=True,
        constraint_param="",
        stream=False,
        timeout_ns=parent.judge_by_ns - state.now_ns,
        traceparent=attempt.span if trace is None else format_traceparent(child(trace, state.rng)),
        parent_span_id="" if trace is None else trace.span_id,
        members=[],
        cascade=CascadeOptions(),
    )
