"""Answers to what ingress asked, and the lack of them: found again by correlation, handed to whoever asked."""

from __future__ import annotations

from millrace.actor.effects import Effect
from millrace.contracts.local import Gathered, Replied, RequestFailed, RequestFailure
from millrace.contracts.tagger import LengthTag
from millrace.contracts.worker import SequenceAccepted, SequenceRefused

from services.ingress.dispatch.submission import accepted, forecasts_came, refused, unanswered
from services.ingress.dispatch.tag_client import tagged
from services.ingress.failover.failover import resend_unanswered
from services.ingress.migration.ownership import proof_unanswered, take_proof
from services.ingress.pending import PendingForecast, PendingProof, PendingResend, PendingSubmit, PendingTag
from services.ingress.state import IngressState, OpenSequence, SequencePhase
from services.ingress.tokens.ingest import take_resent


def take_reply(state: IngressState, reply: Replied, out: list[Effect]) -> None:
    """Someone answered."""
    pending = state.pending.pop(reply.correlation, None)
    answer = reply.body
    if isinstance(pending, PendingSubmit):
        _take_submit_answer(state, pending, answer, out)
    elif isinstance(pending, PendingTag):
        tagged(state, pending, answer if isinstance(answer, LengthTag) else None, out)
    elif isinstance(pending, PendingProof):
        take_proof(state, pending, answer, out)
    elif isinstance(pending, PendingResend):
        take_resent(state, pending, answer, out)


def _take_submit_answer(state: IngressState, pending: PendingSubmit, answer: object, out: list[Effect]) -> None:
    sequence: OpenSequence = pending.sequence
    sequence.submit = ""
    if sequence.phase is not SequencePhase.SUBMITTED:
        return  # its tokens were faster than the answer
    if isinstance(answer, SequenceAccepted):
        accepted(state, sequence, out)
    elif isinstance(answer, SequenceRefused):
        refused(state, sequence, answer, out)
    else:
        unanswered(state, sequence, RequestFailure.MALFORMED, out)


def take_failure(state: IngressState, failure: RequestFailed, out: list[Effect]) -> None:
    """Nobody answered."""
    pending = state.pending.pop(failure.correlation, None)
    if isinstance(pending, PendingSubmit):
        pending.sequence.submit = ""
        if pending.sequence.phase is SequencePhase.SUBMITTED:
            unanswered(state, pending.sequence, failure.reason, out)
    elif isinstance(pending, PendingTag):
        tagged(state, pending, None, out)
    elif isinstance(pending, PendingProof):
        proof_unanswered(state, pending, out)
    elif isinstance(pending, PendingResend):
        resend_unanswered(state, pending, failure.reason, out)


def take_gathered(state: IngressState, gathered: Gathered, out: list[Effect]) -> None:
    """Predictors answered, as far as they did."""
    pending = state.pending.pop(gathered.correlation, None)
    if isinstance(pending, PendingForecast):  # else its call is over
        forecasts_came(state, pending, gathered.answers, out)
