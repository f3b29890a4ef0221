"""Client of a cascade's judge: asks for the score of an attempt, and takes the answer.

The attempt already has its confidence as its score when the judge is asked, and keeps it where the judge gives none:
where it is dead, late, absurd or does not know (docs/CASCADE.md).
"""

from __future__ import annotations

import math
from typing import Any

from millrace.actor.effects import Log, Request
from millrace.contracts.cascade import SCORE_MAX
from millrace.contracts.judge import AnswerJudged, JudgeAnswer

from services.ingress.cascade.open_cascade import OpenCascade
from services.ingress.pending import PendingJudge
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


def ask_judge(state: IngressState, parent: OpenCascade) -> None:
    """Ask for the score of the current attempt."""
    attempt = parent.attempt
    timeout_ns = int(parent.served.config.judge_timeout_s * SECOND_NS)
    parent.asking = state.correlation("judge", PendingJudge(parent, attempt, state.now_ns))
    state.emit(
        Request(
            subject=state.subjects.judge(parent.call.model),
            body=JudgeAnswer(
                request=attempt.request,
                cascade=parent.call.model,
                model=attempt.model,
                prompt=parent.members[attempt.model].judged_prompt,
                answer=attempt.texts(),
            ),
            correlation=parent.asking,
            timeout_ns=max(1, min(timeout_ns, parent.deadline_ns - state.now_ns)),
            request=parent.request,
            traceparent=attempt.span,
        )
    )


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
    event = parent.served.health.note(answered=answered, useful=answered, now_ns=state.now_ns, pause_ns=pause_ns)
    if event:
        level = "warning" if event == "missing" else "info"
        state.emit(
            Log(level=level, event=f"judge_{event}", fields={"cascade": parent.call.model}, request=parent.request)
        )


def _result(answer: Any) -> str:
    if answer is None:
        return "unanswered"
    if not isinstance(answer, AnswerJudged):
        return "unexpected"
    if answer.score is None:
        return "unknown"
    return "answered" if math.isfinite(answer.score) and 0.0 <= answer.score <= SCORE_MAX else "absurd"
