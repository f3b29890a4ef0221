"""Placing sequences: a policy chooses, a worker is asked, its answer moves the sequence on or back into the queue.

A sequence that nobody has is in ``state.waiting``, asked about, or submitted; each submission has an epoch of its own,
so that an answer or token of an earlier one can always be told from the present.
"""

from __future__ import annotations

from typing import Any

from millrace.actor.effects import Effect, Request, StartTimer
from millrace.contracts.local import RequestFailure
from millrace.contracts.worker import RefusalReason, SequenceRefused, SubmitSequence

from services.ingress import tracing
from services.ingress.calls.completion import cancel, detach, refuse_or_fail
from services.ingress.calls.messages import AcceptCall, RefusalKind
from services.ingress.dispatch.decision import (
    DispatchDecision,
    candidates_of,
    decide,
    decide_instead,
    nobody,
    publish_decision,
    view_of,
)
from services.ingress.dispatch.forecast_client import (
    ForecastAnswers,
    ask,
    forecasts_of,
    note_rank,
    paused,
    read_answers,
)
from services.ingress.migration.epoch_grants import next_epoch
from services.ingress.pending import PendingForecast, PendingSubmit
from services.ingress.state import IngressState, OpenCall, OpenSequence, SequencePhase
from services.ingress.times import MILLISECOND_NS, SECOND_NS
from services.ingress.tokens.token_log import deliver_held

#: Timer of the next sequence that is to be tried again.
PLACE_TIMER = "place"
#: Pause after the first round without an instance; doubles up to the next. Losses are known within 1.5 s.
PAUSE_MIN_NS = 50 * MILLISECOND_NS
PAUSE_MAX_NS = 1 * SECOND_NS

_PERMANENT = {RefusalReason.TOO_LONG: RefusalKind.TOO_LONG, RefusalReason.INVALID: RefusalKind.INVALID}


def place_call(state: IngressState, call: OpenCall, out: list[Effect]) -> None:
    """Places a new call: the choices of one prompt together, as they share its prefix."""
    n = call.call.n
    for begin in range(0, len(call.sequences), n):
        place(state, call.sequences[begin : begin + n], out)
        if call.request not in state.calls:
            return


def place(state: IngressState, sequences: list[OpenSequence], out: list[Effect]) -> None:
    """Asks one instance to take sequences of one call, or lets them wait for one.

    A policy that wants predictions has them asked for first; ``forecasts_came`` goes on from there.
    """
    first = sequences[0]
    for sequence in sequences:
        state.waiting.pop(sequence.id, None)
    if not state.connected or first.tries >= state.config.dispatch.tries_max:
        wait(state, sequences, out)
        return
    policy, parameters = state.policy_of(first.call)
    candidates = candidates_of(state, first)
    if not candidates:
        _place_on(state, sequences, nobody(state, first, policy.name), out)
        return
    view = view_of(sequences, candidates)
    fallback = ""
    if policy.ask is None:
        decision = decide(state, policy, parameters, view)
    elif paused(state, view.model):
        decision, fallback = decide_instead(
            state, parameters.fallback, view, why="paused", reason="predictors were silent a moment ago"
        )
    elif ask(state, sequences, view, policy, parameters, out):
        return
    else:
        decision = decide(state, policy, parameters, view)
    _place_on(state, sequences, DispatchDecision(decision=decision, policy=policy.name, fallback=fallback), out)


def forecasts_came(
    state: IngressState, pending: PendingForecast, came: list[tuple[str, Any]], out: list[Effect]
) -> None:
    """Predictors answered, or it is too late for more: decides among those who still may take the sequences."""
    sequences: list[OpenSequence] = pending.sequences
    first = sequences[0]
    for sequence in sequences:
        sequence.asking = ""
        sequence.phase = SequencePhase.WAITING
    answers = read_answers(state, pending, came, out)
    state.metrics.forecast_wait.observe(state.now_ns - pending.started_ns)
    if not state.connected:
        tracing.end_forecast(first.call, pending, forecasts_of(pending, answers, None), state.now_ns, out)
        wait(state, sequences, out)
        return
    dispatch = _judge(state, pending, answers)
    tracing.end_forecast(first.call, pending, dispatch.forecasts, state.now_ns, out)
    note_rank(state, pending, answers, dispatch.decision.chosen)
    _place_on(state, sequences, dispatch, out)


def _judge(state: IngressState, pending: PendingForecast, answers: ForecastAnswers) -> DispatchDecision:
    """The policy's decision among those drawn who answered and are still there; else the fallback's among all."""
    sequences: list[OpenSequence] = pending.sequences
    policy, parameters = state.policy_of(sequences[0].call)
    candidates = candidates_of(state, sequences[0])  # some may have died meanwhile, others come up
    if not candidates:
        return nobody(state, sequences[0], policy.name)
    drawn = tuple(c for c in candidates if c.name in pending.drawn)
    predictions = {c.name: answers.predictions[c.name] for c in drawn if c.name in answers.predictions}
    decision, fallback = None, ""
    if predictions:
        decision = decide(state, policy, parameters, view_of(sequences, drawn, predictions))
    if decision is None or decision.chosen is None:
        why, reason = _missing(answers, gone=not drawn)
        decision, fallback = decide_instead(
            state, parameters.fallback, view_of(sequences, candidates), why=why, reason=reason
        )
    return DispatchDecision(
        decision=decision,
        policy=policy.name,
        fallback=fallback,
        forecasts=forecasts_of(pending, answers, decision.chosen),
        asked_ns=pending.started_ns,
    )


def _missing(answers: ForecastAnswers, *, gone: bool) -> tuple[str, str]:
    """Why there is no prediction to decide by: a label and the beginning of a sentence."""
    if gone or answers.predictions:
        return "gone", "those who were asked are gone"
    notes = sorted(set(answers.notes.values()))
    return "no_prediction", f"no prediction of {len(answers.notes)} asked ({', '.join(notes[:3])})"


def _place_on(
    state: IngressState, sequences: list[OpenSequence], dispatch: DispatchDecision, out: list[Effect]
) -> None:
    """Submits to whom the dispatch names, or waits where it names nobody."""
    first = sequences[0]
    call = first.call
    chosen = dispatch.decision.chosen
    call.policy = dispatch.policy
    if chosen is None:
        if not first.rounds:
            publish_decision(state, sequences, dispatch, out)
        wait(state, sequences, out)
        return
    if not call.accepted:
        call.placed_ns = state.now_ns
        call.forecast = dispatch.forecast if len(call.call.prompts) == 1 else None
    for sequence in sequences:
        sequence.epoch = next_epoch(sequence)
        _submit(state, sequence, dispatch, out)
    publish_decision(state, sequences, dispatch, out)
    state.metrics.dispatches.add(dispatch.policy, chosen, by=len(sequences))


def _submit(state: IngressState, sequence: OpenSequence, dispatch: DispatchDecision, out: list[Effect]) -> None:
    assert dispatch.decision.chosen is not None
    call = sequence.call
    instance = state.cluster.instances[dispatch.decision.chosen]
    sequence.tries += 1
    sequence.phase = SequencePhase.SUBMITTED
    sequence.instance = instance
    sequence.incarnation = instance.incarnation
    sequence.fresh = True
    sequence.moved = False
    sequence.span_attributes = tracing.begin_placement(sequence, dispatch, state.now_ns, state.rng)
    instance.place(sequence.id, len(sequence.prompt) + len(sequence.log))
    state.owned.setdefault(instance.name, {})[sequence.id] = sequence
    sequence.submit = state.correlation("submit", PendingSubmit(sequence, sequence.epoch, instance))
    out.append(
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
            ),
            correlation=sequence.submit,
            timeout_ns=max(1, min(state.times.submit_timeout, call.deadline_ns - state.now_ns)),
            request=call.request,
            traceparent=sequence.span,
        )
    )


def wait(state: IngressState, sequences: list[OpenSequence], out: list[Effect]) -> None:
    """No instance just now: tried again after a pause, or the call's time is over."""
    first = sequences[0]
    call = first.call
    if state.connected and _waited_out(state, first, out):
        return
    pause_ns = min(PAUSE_MAX_NS, PAUSE_MIN_NS << min(first.rounds, 10))
    for sequence in sequences:
        sequence.phase = SequencePhase.WAITING
        sequence.tries = 0
        sequence.rounds += 1
        sequence.retry_at_ns = state.now_ns + pause_ns
        state.waiting[sequence.id] = sequence
    arm_place_timer(state, first.retry_at_ns, out)
    assert call.request in state.calls


def _waited_out(state: IngressState, sequence: OpenSequence, out: list[Effect]) -> bool:
    """Gives the call up if this sequence has waited for as long as it may. True if so."""
    call = sequence.call
    waited_ns = state.now_ns - sequence.waiting_since_ns
    if sequence.owned:
        if waited_ns < state.times.continuation:
            return False
        refuse_or_fail(
            state,
            call,
            RefusalKind.CONTINUATION_FAILED,
            f"The instance that decoded this request was lost ({sequence.why}) and within {waited_ns / 1e9:.1f} s no "
            f"other one of {call.call.model} could go on with it.",
            out,
        )
        return True
    if state.cluster.expects(call.call.model) and waited_ns < state.times.wait:
        return False
    full = sequence.why == RefusalReason.FULL.value
    kind = RefusalKind.QUEUE_FULL if full else RefusalKind.NO_INSTANCE
    detail = "every instance's queue is full" if full else "no instance of it takes work now"
    refuse_or_fail(state, call, kind, f"The model {call.call.model} cannot be served: {detail}.", out)
    return True


def arm_place_timer(state: IngressState, at_ns: int, out: list[Effect]) -> None:
    """Has the place timer fire at that time or earlier."""
    if not state.place_timer_ns or at_ns < state.place_timer_ns:
        state.place_timer_ns = at_ns
        out.append(StartTimer(name=PLACE_TIMER, at_ns=at_ns))


def place_waiting(state: IngressState, out: list[Effect], *, all_of_them: bool = False) -> None:
    """Tries again what is due (or everything: an instance came up)."""
    state.place_timer_ns = 0
    for sequence in list(state.waiting.values()):
        if sequence.id not in state.waiting:  # its call was given up by an earlier one
            continue
        if all_of_them or sequence.retry_at_ns <= state.now_ns:
            place(state, [sequence], out)
    if state.waiting:
        arm_place_timer(state, min(s.retry_at_ns for s in state.waiting.values()), out)


def accepted(state: IngressState, sequence: OpenSequence, out: list[Effect]) -> None:
    """The instance owns the sequence in this epoch: it said so, or its tokens did."""
    instance = sequence.instance
    assert instance is not None
    call = sequence.call
    now_ns = state.now_ns
    instance.accept(sequence.id)
    sequence.phase = SequencePhase.RUNNING
    sequence.tries = sequence.rounds = 0
    sequence.excluded = {}
    sequence.waiting_since_ns = 0
    sequence.probe_after_ns = state.times.probe
    sequence.placed_ns = now_ns
    tracing.end_placement(sequence, sequence.span_attributes, "", now_ns, out)
    sequence.span_attributes = None
    sequence.why = ""
    if instance.name not in call.instances:
        call.instances.append(instance.name)
    if sequence.owned:
        return
    sequence.owned = True
    call.unaccepted -= 1
    if not call.unaccepted:
        call.accepted = True
        state.metrics.queue.observe(now_ns - call.arrival_ns)
        state.metrics.prompt_tokens += call.prompt_tokens
        out.append(AcceptCall(request=call.request))
        deliver_held(call, out)


def refused(state: IngressState, sequence: OpenSequence, answer: SequenceRefused, out: list[Effect]) -> None:
    """A worker did not take it: another one is asked, unless none ever will."""
    instance = sequence.instance
    assert instance is not None
    kind = _PERMANENT.get(answer.reason)
    if kind is not None:
        _give_back(state, sequence, answer.reason.value, out)
        detail = answer.detail or f"The engine refuses the request: {answer.reason.value}."
        refuse_or_fail(state, sequence.call, kind, detail, out)
        return
    if answer.reason in (RefusalReason.DRAINING, RefusalReason.ENGINE_DOWN):
        state.cluster.withdraw(instance)
    _exclude(sequence)
    _give_back(state, sequence, answer.reason.value, out)
    place(state, [sequence], out)


def unanswered(state: IngressState, sequence: OpenSequence, reason: RequestFailure, out: list[Effect]) -> None:
    """Nobody answered. Whoever may still get the submission is told to drop it; another instance is asked."""
    instance = sequence.instance
    assert instance is not None
    if reason is not RequestFailure.NO_RESPONDERS:
        cancel(state, sequence, "submit_" + reason.value, out)
    if reason is RequestFailure.DISCONNECTED or not state.detecting(state.now_ns):  # the instance is not to blame
        _give_back(state, sequence, reason.value, out)
        wait(state, [sequence], out)
        return
    if reason is RequestFailure.NO_RESPONDERS:
        state.cluster.withdraw(instance)  # until its next summary: it has no subscription now
    _exclude(sequence)
    _give_back(state, sequence, reason.value, out)
    place(state, [sequence], out)


def _exclude(sequence: OpenSequence) -> None:
    assert sequence.instance is not None
    sequence.excluded[sequence.instance.name] = sequence.incarnation


def _give_back(state: IngressState, sequence: OpenSequence, why: str, out: list[Effect]) -> None:
    """The submission came to nothing: the sequence is ingress's again."""
    tracing.end_placement(sequence, sequence.span_attributes, why, state.now_ns, out)
    sequence.span_attributes = None
    detach(state, sequence)
    sequence.phase = SequencePhase.WAITING
    if not sequence.owned or not sequence.why:
        sequence.why = why
