"""Reply router: hands an answer, or the lack of one, to whoever asked, by its correlation."""

from __future__ import annotations

from millrace.contracts.local import Gathered, Replied, RequestFailed, RequestFailure
from millrace.contracts.tagger import LengthTag
from millrace.contracts.worker import SequenceAccepted, SequenceRefused

from services.ingress.adapters import take_adapter_answers
from services.ingress.cascade.reactions import take_judgement
from services.ingress.dispatch.dispatcher import on_forecasts, on_tag
from services.ingress.failover.resend import resend_unanswered
from services.ingress.lifecycle import Accepted, SequencePhase, SubmissionRefused, SubmissionUnanswered
from services.ingress.migration.ownership import proof_unanswered, take_proof
from services.ingress.pending import (
    PendingAdapter,
    PendingForecast,
    PendingJudge,
    PendingProof,
    PendingResend,
    PendingSubmit,
    PendingTag,
)
from services.ingress.state import IngressState
from services.ingress.tokens.ingest import take_resent


def take_reply(state: IngressState, reply: Replied | RequestFailed) -> None:
    """Handle an answer, or the lack of one."""
    pending = state.pending.pop(reply.correlation, None)
    failed = reply.reason if isinstance(reply, RequestFailed) else None
    answer = reply.body if isinstance(reply, Replied) else None
    match pending:
        case PendingSubmit():
            _take_submit_answer(state, pending, answer, failed or RequestFailure.MALFORMED)
        case PendingTag():
            on_tag(state, pending, answer if isinstance(answer, LengthTag) else None)
        case PendingProof() if failed is not None:
            proof_unanswered(state, pending)
        case PendingProof():
            take_proof(state, pending, answer)
        case PendingResend() if failed is not None:
            resend_unanswered(state, pending, failed)
        case PendingResend():
            take_resent(state, pending, answer)
        case PendingJudge():
            take_judgement(state, pending, answer)
        case PendingForecast() | PendingAdapter() | None:
            pass  # these come gathered; the question of a call that ended was forgotten


def _take_submit_answer(state: IngressState, pending: PendingSubmit, answer: object, fault: RequestFailure) -> None:
    """``fault``: Why there is no answer of a worker, where there is none."""
    sequence = pending.sequence
    sequence.submit = ""
    if sequence.phase is not SequencePhase.SUBMITTED:
        return  # its tokens arrived before the answer
    if isinstance(answer, SequenceAccepted):
        state.fire(sequence, Accepted(answer.kv_tokens))
    elif isinstance(answer, SequenceRefused):
        state.fire(sequence, SubmissionRefused(answer))
    else:
        state.fire(sequence, SubmissionUnanswered(fault))


def take_gathered(state: IngressState, gathered: Gathered) -> None:
    """Handle answers of several, as far as they came."""
    pending = state.pending.pop(gathered.correlation, None)
    if isinstance(pending, PendingAdapter):
        take_adapter_answers(state, pending, gathered.answers)
    if isinstance(pending, PendingForecast):  # else its call has ended
        on_forecasts(state, pending, gathered.answers)
