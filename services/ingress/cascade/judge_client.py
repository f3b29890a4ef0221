"""Client of a cascade's judge: asks for the score of an attempt, and takes the answer.

The attempt already has its confidence as its score when the judge is asked, and keeps it where the judge gives none.

event                                         consequence                          counted as
the plan's judge is ``confidence``            computed here                        –
the judge answers 0 to 100                    its score                            ``answered``
it answers None                               confidence                           ``unknown``
it answers NaN, infinity or out of bounds     confidence                           ``absurd``
it answers something else                     confidence                           ``unexpected``
it does not answer in time, or is not there   confidence                           ``unanswered``
its model does not (``questions.py``)         confidence                           ``unanswered``
that three times in a row                     nobody is asked for a while          ``paused``
several prompts in one request                confidence: a judge takes one        –
"""

from __future__ import annotations

import math
from typing import Any

from millrace.actor.effects import Log, Request
from millrace.contracts.cascade import SCORE_MAX
from millrace.contracts.judge import AnswerJudged, JudgeAnswer

from services.ingress.calls.messages import MemberCall
from services.ingress.cascade.lifecycle import Opinions
from services.ingress.cascade.open_cascade import OpenCascade
from services.ingress.pending import PendingJudge
from services.ingress.sequence import OpenSequence
from services.ingress.state import IngressState
from services.ingress.times import SECOND_NS


def wants_judge(state: IngressState, parent: OpenCascade) -> bool:
    """Whether the judge is asked: not where confidence is the judge, nor after it was silent."""
    if parent.served.plan.judge == "confidence" or len(parent.call.prompts) > 1 or not state.connected:
        return False
    if state.now_ns < parent.served.health.from_ns:
        state.metrics.judgements.add(parent.call.model, "paused")
        return False
    return True


def ask_judge(
    state: IngressState, parent: OpenCascade, member: MemberCall, *, opinions: Opinions | None = None
) -> None:
    """Ask for the score of the current attempt; ``opinions`` are those of the judge's model, where it has one."""
    timeout_ns = int(parent.served.config.judge_timeout_s * SECOND_NS)
    parent.asking = state.correlation("judge", PendingJudge(parent, parent.attempt, state.now_ns))
    state.emit(
        Request(
            subject=state.subjects.judge(parent.call.model),
            body=_question(parent, member, opinions or []),
            correlation=parent.asking,
            timeout_ns=max(1, min(timeout_ns, parent.deadline_ns - state.now_ns)),
            request=parent.request,
            traceparent=parent.attempt.span,
        )
    )


def _question(parent: OpenCascade, member: MemberCall, opinions: Opinions) -> JudgeAnswer:
    attempt = parent.attempt
    assert attempt.call is not None
    sequences = attempt.call.sequences
    structured = member.sampling.structured
    kind, constraint = "", ""
    if structured is not None:
        kind = next((name for name in structured.__struct_fields__ if getattr(structured, name)), "")
        value = getattr(structured, kind, "")
        constraint = value if isinstance(value, str) else "\n".join(value) if isinstance(value, list) else ""
    return JudgeAnswer(
        request=attempt.request,
        cascade=parent.call.model,
        tier=attempt.tier,
        model=attempt.model,
        kind="llm" if opinions else parent.served.plan.judge,
        prompt=member.prompt,
        answer=attempt.texts(),
        logprobs=[_known(sequence) for sequence in sequences],
        finish_reasons=[sequence.output.finish_reason for sequence in sequences],
        structured=kind,
        constraint=constraint,
        tools=member.tools,
        confidence=attempt.score,
        opinions=opinions,
    )


def _known(sequence: OpenSequence) -> list[float]:
    """Its log-probabilities; none where one is missing."""
    assert sequence.evidence is not None
    values = sequence.evidence.logprobs
    return [] if any(map(math.isnan, values)) else list(values)


def take_answer(state: IngressState, pending: PendingJudge, answer: Any) -> None:
    """Set the score that a judge gave; confidence stands where it gave none. ``answer`` is None for no answer."""
    parent, attempt = pending.cascade, pending.attempt
    parent.asking = ""
    result = _result(answer)
    state.metrics.judgements.add(parent.call.model, result)
    if result == "answered":
        attempt.score, attempt.judged_by, attempt.detail = answer.score, answer.kind, answer.reason
    else:
        attempt.detail = f"the judge's answer is {result}"
    pause_ns = int(parent.served.config.judge_pause_s * SECOND_NS)
    answered = result in ("answered", "unknown")
    event = parent.served.health.note(answered=answered, now_ns=state.now_ns, pause_ns=pause_ns)
    if event:
        level = "warning" if event == "judge_missing" else "info"
        state.emit(Log(level=level, event=event, fields={"cascade": parent.call.model}, request=parent.request))


def _result(answer: Any) -> str:
    """Label of the metric ``judgements``."""
    if answer is None:
        return "unanswered"
    if not isinstance(answer, AnswerJudged):
        return "unexpected"
    if answer.score is None:
        return "unknown"
    return "answered" if math.isfinite(answer.score) and 0.0 <= answer.score <= SCORE_MAX else "absurd"
