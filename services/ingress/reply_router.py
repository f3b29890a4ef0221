"""Reply router: hands an answer, or the lack of one, to whoever asked, by its correlation."""

from __future__ import annotations

from millrace.contracts.local import Gathered, Replied, RequestFailed, RequestFailure
from millrace.contracts.tagger import LengthTag
from millrace.contracts.worker import SequenceAccepted, SequenceRefused

from services.ingress.cascade.reactions import take_judgement
from services.ingress.dispatch.dispatcher import on_forecasts, on_tag
from services.ingress.failover.resend import resend_unanswered
from services.ingress.lifecycle import Accepted, SequencePhase, SubmissionRefused, SubmissionUnanswered
from services.ingress.migration.ownership import proof_unanswered, take_proof
from services.ingress.pending import (
    PendingForecast,
    PendingJudge,
    PendingProof,
    PendingResend,
    PendingSubmit,
    PendingTag,
)
from services.ingress.state import IngressState
from services.ingress.tokens.ingest import take_resent


def take_reply(state: IngressState, reply: Replied) -> None:
    """Handle an answer."""
    pending = state.pending.pop(reply.correlation, None)
    answer = reply.body
    match pending:
        case PendingSubmit():
            _take_submit_answer(state, pending, answer)
        case PendingTag():
            on_tag(state, pending, answer if isinstance(answer, LengthTag) else None)
        case PendingProof():
            take_proof(state, pending, answer)
        case PendingResend():
            take_resent(state, pending, answer)
        case PendingJudge():
            take_judgement(state, pending, answer)
        case PendingForecast() | None:
            pass  # forecasts come gathered; the question of a call that ended was forgotten


def _take_submit_answer(state: IngressState, pending: PendingSubmit, answer: object) -> None:
    sequence = pending.sequence
    sequence.submit = ""
    if sequence.phase is not SequencePhase.SUBMITTED:
        return  # its tokens arrived before the answer
    if isinstance(answer, SequenceAccepted):
        state.fire(sequence, Accepted(answer.kv_tokens))
    elif isinstance(answer, SequenceRefused):
        state.fire(sequence, SubmissionRefused(answer))
    else:
        state.fire(sequence, SubmissionUnanswered(RequestFailure.MALFORMED))


def take_failure(state: IngressState, failure: RequestFailed) -> None:
    """Handle the lack of an answer."""
    pending = state.pending.pop(failure.correlation, None)
    match pending:
        case PendingSubmit():
            pending.sequence.submit = ""
            if pending.sequence.phase is SequencePhase.SUBMITTED:
                state.fire(pending.sequence, SubmissionUnanswered(failure.reason))
        case PendingTag():
            on_tag(state, pending, None)
        case PendingProof():
            proof_unanswered(state, pending)
        case PendingResend():
            resend_unanswered(state, pending, failure.reason)
        case PendingJudge():
            take_judgement(state, pending, None)
        case PendingForecast() | None:
            pass


def take_gathered(state: IngressState, gathered: Gathered) -> None:
    """Handle the answers of predictors, as far as they came."""
    pending = state.pending.pop(gathered.correlation, None)
    if isinstance(pending, PendingForecast):  # else its call has ended
        on_forecasts(state, pending, gathered.answers)
