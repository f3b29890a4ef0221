"""Submission: reactions that move a sequence to an instance, or back to ingress.

Each submission has an epoch of its own, so an answer or token of an earlier one can always be told from the present.
"""

from __future__ import annotations

from millrace.actor.effects import Request
from millrace.contracts.local import RequestFailure
from millrace.contracts.worker import RefusalReason, SubmitSequence

from services.ingress import tracing
from services.ingress.calls.completion import cancel, detach, refuse_or_fail
from services.ingress.calls.engine_errors import engine_error
from services.ingress.calls.messages import RefusalKind
from services.ingress.cluster.instances import KnownInstance
from services.ingress.dispatch.dispatcher import arm_dispatch_timer, defer, dispatch
from services.ingress.dispatch.trial import note_submission
from services.ingress.lifecycle import (
    Accepted,
    Deferred,
    ForecastsReceived,
    ForecastsRequested,
    SubmissionRefused,
    SubmissionUnanswered,
    Submitted,
)
from services.ingress.migration.replicas import note_resumed, use_replica
from services.ingress.pending import PendingSubmit
from services.ingress.sequence import OpenSequence
from services.ingress.state import IngressState
from services.ingress.times import PROBE_NS, SECOND_NS, SUBMIT_TIMEOUT_NS

#: Time that a worker has besides for a constraint, which it compiles on trial.
CONSTRAINT_NS = 5 * SECOND_NS
#: Doublings of the time for an answer, one for each further instance: what is cancelled too soon is taken by none.
DOUBLINGS_MAX = 3
#: Refusals that every instance would repeat.
_PERMANENT = {RefusalReason.TOO_LONG: RefusalKind.TOO_LONG, RefusalReason.INVALID: RefusalKind.INVALID}


def enqueue(state: IngressState, sequence: OpenSequence, event: Deferred) -> None:
    """Keep a sequence until its pause is over."""
    retry = sequence.retry
    retry.tries = 0
    retry.rounds += 1
    retry.at_ns = state.now_ns + event.pause_ns
    state.waiting[sequence.id] = sequence
    arm_dispatch_timer(state, retry.at_ns)


def await_forecasts(state: IngressState, sequence: OpenSequence, event: ForecastsRequested) -> None:
    """Remember the question to predictors."""
    sequence.asking = event.correlation


def forget_question(state: IngressState, sequence: OpenSequence, event: ForecastsReceived) -> None:
    """The question to predictors is answered."""
    sequence.asking = ""


def submit(state: IngressState, sequence: OpenSequence, event: Submitted) -> None:
    """Submit a sequence to the chosen instance, with its log so far."""
    chosen = event.choice.decision.chosen
    assert chosen is not None
    instance = state.cluster.instances[chosen]
    sequence.retry.tries += 1
    sequence.epoch = sequence.next_epoch()
    sequence.instance, sequence.incarnation = instance, instance.member.incarnation
    sequence.fresh, sequence.moved = True, False
    sequence.placed_ns = state.now_ns
    tracing.begin_placement(state, sequence, event.choice)
    note_submission(state, sequence, instance)
    instance.place(sequence.id, len(sequence.prompt) + len(sequence.log))
    state.owned.setdefault(instance.name, {})[sequence.id] = sequence
    _ask(state, sequence, instance, replica=use_replica(state, sequence, instance))


def ask_again(state: IngressState, sequence: OpenSequence, event: SubmissionUnanswered) -> None:
    """Ask an instance that is silent since the first question once more: another one might be held up as well. The
    question is idempotent, and whoever watches the instance takes the sequence from it in the end.
    """
    assert sequence.instance is not None
    _ask(state, sequence, sequence.instance)


def unheard(state: IngressState, sequence: OpenSequence, event: SubmissionUnanswered) -> bool:
    """Whether an instance that did not answer gave no sign of life either."""
    assert sequence.instance is not None
    silent = sequence.instance.member.heard_ns < sequence.placed_ns
    return silent and event.reason is RequestFailure.TIMEOUT and state.detecting(state.now_ns)


def _ask(state: IngressState, sequence: OpenSequence, instance: KnownInstance, *, replica: str = "") -> None:
    call = sequence.call
    timeout_ns = SUBMIT_TIMEOUT_NS << min(sequence.retry.tries - 1, DOUBLINGS_MAX)
    timeout_ns += CONSTRAINT_NS if sequence.sampling.structured is not None else 0
    sequence.submit = state.correlation("submit", PendingSubmit(sequence, sequence.epoch))
    state.emit(
        Request(
            subject=state.subjects.engine(instance.name, "submit"),
            body=SubmitSequence(
                sequence=sequence.id,
                epoch=sequence.epoch,
                ingress=state.name,
                ingress_incarnation=state.incarnation,
                prompt_token_ids=sequence.prompt,
                sampling=sequence.sampling,
                output_token_ids=sequence.log[:],
                expected_output_tokens=call.expected_output_tokens,
                deadline_ns=call.deadline_ns,
                replica=replica,
            ),
            correlation=sequence.submit,
            timeout_ns=max(1, min(timeout_ns, call.deadline_ns - state.now_ns)),
            request=call.request,
            traceparent=sequence.span.context,
        )
    )


def accept(state: IngressState, sequence: OpenSequence, event: Accepted) -> None:
    """The instance owns the sequence; with the last sequence of a call the call is accepted."""
    instance, call, now_ns = sequence.instance, sequence.call, state.now_ns
    assert instance is not None
    instance.accept(sequence.id)
    sequence.retry.owned()
    sequence.resend.after_ns = PROBE_NS
    sequence.placed_ns = now_ns
    if event.kv_tokens:
        note_resumed(state, sequence, event.kv_tokens)
    tracing.end_placement(state, sequence, "")
    if instance.name not in call.instances:
        call.instances.append(instance.name)
    if sequence.owned:
        return
    sequence.owned = True
    call.unaccepted -= 1
    if not call.unaccepted:
        call.accepted = True
        state.metrics.queue.observe(now_ns - call.arrival_ns)
        state.metrics.vllm.of(call.call.model).prompt_tokens += call.prompt_tokens
        call.listener.on_accepted(call)
        call.deliver_held()


def retry_refused(state: IngressState, sequence: OpenSequence, event: SubmissionRefused) -> None:
    """Ask another instance, unless each one would refuse."""
    instance, answer = sequence.instance, event.answer
    assert instance is not None
    kind = _PERMANENT.get(answer.reason)
    if kind is not None:
        _take_back(state, sequence, answer.reason.value)
        detail, param = engine_error(sequence.call.call, answer)
        refuse_or_fail(state, sequence.call, kind, detail, param=param)
        return
    if answer.reason in (RefusalReason.DRAINING, RefusalReason.ENGINE_DOWN):
        state.cluster.withdraw(instance)
    _exclude(sequence)
    _take_back(state, sequence, answer.reason.value)
    dispatch(state, [sequence])


def retry_unanswered(state: IngressState, sequence: OpenSequence, event: SubmissionUnanswered) -> None:
    """Cancel the submission, which may still arrive, and ask another instance."""
    instance, reason = sequence.instance, event.reason
    assert instance is not None
    if reason is not RequestFailure.NO_RESPONDERS:
        cancel(state, sequence, "submit_" + reason.value)
    if reason is RequestFailure.DISCONNECTED or not state.detecting(state.now_ns):  # the instance is not to blame
        _take_back(state, sequence, reason.value)
        defer(state, [sequence])
        return
    if reason is RequestFailure.NO_RESPONDERS:
        state.cluster.withdraw(instance)  # until its next summary: it has no subscription now
    _exclude(sequence)
    _take_back(state, sequence, reason.value)
    dispatch(state, [sequence])


def _exclude(sequence: OpenSequence) -> None:
    assert sequence.instance is not None
    sequence.retry.excluded[sequence.instance.name] = sequence.incarnation


def _take_back(state: IngressState, sequence: OpenSequence, why: str) -> None:
    """The submission failed: ingress owns the sequence again."""
    tracing.end_placement(state, sequence, why)
    detach(state, sequence)
    if not sequence.owned or not sequence.retry.why:
        sequence.retry.why = why
