"""Dispatcher: a dispatch decision from top to bottom.

    1. length tag    a new call's expected output is asked of the tagger (tag_client.py)
    2. candidates    instances that may take the sequences (candidates.py)
    3. forecasts     predictors are asked, where the policy wants them (forecast_client.py)
    4. policy        chooses one candidate; its fallback does where forecasts are missing
    5. submission    the choice is published and submitted, or the sequences wait (submission.py)

Sequences of one prompt are dispatched together, since they share its prefix. A failover enters at 2.
"""

from __future__ import annotations

from typing import Any

from millrace.actor.effects import Log, StartTimer
from millrace.contracts.local import RequestFailure
from millrace.contracts.tagger import LengthTag
from millrace.contracts.worker import RefusalReason
from millrace.policies.dispatch import DISPATCH_POLICIES, Decision, DispatchView, QueryParameters
from millrace.policies.dispatch.guarded import PolicyFault, run_ask, run_decide
from millrace.policies.dispatch.view import named_views

from services.ingress import tracing
from services.ingress.calls.completion import refuse_or_fail
from services.ingress.calls.messages import RefusalKind
from services.ingress.calls.open_call import OpenCall
from services.ingress.dispatch.candidates import candidates_of, left_out, view_of
from services.ingress.dispatch.decision_publishing import publish_decision
from services.ingress.dispatch.forecast_client import (
    ForecastAnswers,
    ask_predictors,
    forecasts_of,
    predictors_paused,
    read_answers,
)
from services.ingress.dispatch.tag_client import ask_tag, take_tag, wants_tag
from services.ingress.dispatch.trial import must_wait
from services.ingress.lifecycle import Deferred, DispatchChoice, ForecastsReceived, Submitted
from services.ingress.migration.replicas import choice_of
from services.ingress.pending import PendingForecast, PendingTag
from services.ingress.sequence import OpenSequence
from services.ingress.state import IngressState
from services.ingress.times import MILLISECOND_NS, SECOND_NS

#: Timer of the next sequence that is to be dispatched again.
DISPATCH_TIMER = "place"
#: Pause after the first round without an instance; doubles up to the next. Losses are known within 1.5 s.
PAUSE_MIN_NS = 50 * MILLISECOND_NS
PAUSE_MAX_NS = 1 * SECOND_NS
#: Why an instance may live that a sequence was not given to: it has much to do, or this process was cut off.
_UNANSWERED = (RequestFailure.TIMEOUT.value, RequestFailure.DISCONNECTED.value)
#: Decides where a policy without a fallback of its own fails.
FALLBACK = "join_shortest_queue"
#: Places of policy faults that are logged; further ones are only counted.
FAULTS_LOGGED_MAX = 100
#: Instances that are asked before a call is refused.
TRIES_MAX = 8


# 1. Length tag.


def dispatch_new(state: IngressState, call: OpenCall) -> None:
    """Dispatch a call that was just admitted."""
    if wants_tag(state, call):
        ask_tag(state, call)
    else:
        dispatch_call(state, call)


def on_tag(state: IngressState, pending: PendingTag, tag: LengthTag | None) -> None:
    """Dispatch a call whose tag has arrived, or will not."""
    take_tag(state, pending, tag)
    dispatch_call(state, pending.call)


def dispatch_call(state: IngressState, call: OpenCall) -> None:
    """Dispatch a new call, the choices of each prompt together."""
    n = call.call.n
    for begin in range(0, len(call.sequences), n):
        dispatch(state, call.sequences[begin : begin + n])
        if call.request not in state.calls:
            return


# 2. Candidates.


def dispatch(state: IngressState, sequences: list[OpenSequence]) -> None:
    """Find an instance for sequences of one prompt, or let them wait for one."""
    first = sequences[0]
    for sequence in sequences:
        state.waiting.pop(sequence.id, None)
    if not state.connected or first.retry.tries >= TRIES_MAX:
        defer(state, sequences)
        return
    if must_wait(state, first):
        defer(state, sequences)
        return
    candidates = candidates_of(state, first)
    if not candidates:
        _carry_out(state, sequences, _nobody(state, first))
        return
    resumed = choice_of(state, first, candidates)
    if resumed is not None:
        _carry_out(state, sequences, resumed)
        return
    _decide_or_ask(state, sequences, view_of(sequences, candidates))


def _nobody(state: IngressState, sequence: OpenSequence) -> DispatchChoice:
    decision = Decision(None, "no instance can take it", left_out(state, sequence))
    return DispatchChoice(decision=decision, policy=state.policy.name)


# 3. Forecasts.


def _decide_or_ask(state: IngressState, sequences: list[OpenSequence], view: DispatchView) -> None:
    """Decide at once, unless the policy wants forecasts; ``on_forecasts`` then goes on."""
    policy, parameters, fallback = state.policy, state.parameters, ""
    if policy.ask is not None and predictors_paused(state, view.model):
        decision, fallback = _decide_by_fallback(
            state, parameters.fallback, view, why="paused", reason="predictors were silent a moment ago"
        )
    elif policy.ask is not None and (asked := _whom_to_ask(state, view)):
        ask_predictors(state, sequences, view, asked, parameters)
        return
    else:
        decision, fallback = _run_policy(state, view)
    _carry_out(state, sequences, DispatchChoice(decision=decision, policy=policy.name, fallback=fallback))


def _whom_to_ask(state: IngressState, view: DispatchView) -> tuple[str, ...]:
    """Candidates whose predictors the policy asks; none where it names none, or fails."""
    asked = run_ask(state.policy, view, parameters=state.parameters, rng=state.rng)
    if isinstance(asked, PolicyFault):
        _note_fault(state, asked)
        return ()
    return asked


def on_forecasts(state: IngressState, pending: PendingForecast, received: list[tuple[str, Any]]) -> None:
    """Decide with the forecasts that have arrived by their deadline."""
    sequences = pending.sequences
    call = sequences[0].call
    for sequence in sequences:
        state.fire(sequence, ForecastsReceived())
    answers = read_answers(state, pending, received)
    state.metrics.forecast_wait.observe(state.now_ns - pending.started_ns)
    if not state.connected:
        tracing.end_forecast(state, call, pending, forecasts_of(pending, answers, None))
        defer(state, sequences)
        return
    choice = _choose(state, pending, answers)
    tracing.end_forecast(state, call, pending, choice.forecasts)
    _carry_out(state, sequences, choice)


# 4. Policy.


def _choose(state: IngressState, pending: PendingForecast, answers: ForecastAnswers) -> DispatchChoice:
    """The policy's choice among those asked that answered and are still there; else the fallback's among all."""
    sequences = pending.sequences
    candidates = candidates_of(state, sequences[0])  # some may have died meanwhile, others come up
    if not candidates:
        return _nobody(state, sequences[0])
    asked = named_views(candidates, pending.asked)
    predictions = {c.name: answers.predictions[c.name] for c in asked if c.name in answers.predictions}
    decision, fallback = None, ""
    if predictions:
        decision, fallback = _run_policy(state, view_of(sequences, asked, predictions))
    if decision is None or decision.chosen is None:
        why, reason = _missing(answers, gone=not asked)
        decision, fallback = _decide_by_fallback(
            state, state.parameters.fallback, view_of(sequences, candidates), why=why, reason=reason
        )
    return DispatchChoice(
        decision=decision,
        policy=state.policy.name,
        fallback=fallback,
        forecasts=forecasts_of(pending, answers, decision.chosen),
        asked_ns=pending.started_ns,
    )


def _missing(answers: ForecastAnswers, *, gone: bool) -> tuple[str, str]:
    """Reason why no forecast can be used: a metric label, and the beginning of the decision's reason."""
    if gone or answers.predictions:
        return "gone", "those who were asked are gone"
    notes = sorted(set(answers.notes.values()))
    return "no_prediction", f"no prediction of {len(answers.notes)} asked ({', '.join(notes[:3])})"


def _run_policy(state: IngressState, view: DispatchView) -> tuple[Decision, str]:
    """Run the policy and keep its next state; where it fails, the fallback decides and is named."""
    policy, parameters = state.policy, state.parameters
    key = (policy.name, view.model)
    before = state.policy_states.get(key, policy.initial_state)
    result = run_decide(policy, view, parameters=parameters, state=before, now_ns=state.now_ns, rng=state.rng)
    if isinstance(result, PolicyFault):
        _note_fault(state, result)
        fallback = parameters.fallback if isinstance(parameters, QueryParameters) else FALLBACK
        return _decide_by_fallback(state, fallback, view, why="policy_failed", reason=f"{policy.name} failed")
    decision, state.policy_states[key] = result
    return decision, ""


def _note_fault(state: IngressState, fault: PolicyFault) -> None:
    """Count a fault of the policy, and log each place where it was raised once."""
    state.metrics.policy_faults.add(state.policy.name)
    if fault.where in state.policy_faults or len(state.policy_faults) >= FAULTS_LOGGED_MAX:
        return
    state.policy_faults.add(fault.where)
    fields = {"policy": state.policy.name, "where": fault.where, "error": fault.error}
    state.emit(Log(level="error", event="policy_failed", fields=fields))


def _decide_by_fallback(
    state: IngressState, fallback: str, view: DispatchView, *, why: str, reason: str
) -> tuple[Decision, str]:
    """Run the fallback policy where forecasts are missing; returns the decision and the fallback's name.

    Args:
        why: Label of the metric.
        reason: Begins the decision's reason.
    """
    policy = DISPATCH_POLICIES.load(fallback)
    key = (policy.name, view.model)
    before = state.policy_states.get(key, policy.initial_state)
    decision, state.policy_states[key] = policy.decide(view, policy.parameters(), before, state.now_ns, state.rng)
    state.metrics.fallbacks.add(why)
    return Decision(decision.chosen, f"{reason}; {fallback}: {decision.reason}", decision.scores), fallback


# 5. Submission.


def _carry_out(state: IngressState, sequences: list[OpenSequence], choice: DispatchChoice) -> None:
    """Submit to the chosen instance, or wait where there is none."""
    first = sequences[0]
    call = first.call
    chosen = choice.decision.chosen
    call.policy = choice.policy
    if chosen is None:
        if not first.retry.rounds:
            publish_decision(state, sequences, choice)
        defer(state, sequences)
        return
    if not call.accepted:
        call.placed_ns = state.now_ns
        call.forecast = choice.forecast if len(call.call.prompts) == 1 else None
    for sequence in sequences:
        state.fire(sequence, Submitted(choice))
    publish_decision(state, sequences, choice)
    state.metrics.dispatches.add(choice.policy, chosen, by=len(sequences))


def defer(state: IngressState, sequences: list[OpenSequence]) -> None:
    """Dispatch again after a pause, at the latest when the wait is over, or end the call where it is."""
    first = sequences[0]
    if not (first.retry.lost or first.retry.rounds):
        for sequence in sequences:  # their wait begins: what an instance took to answer was none
            sequence.retry.since_ns = state.now_ns
    if state.connected and _end_if_waited_out(state, first):
        return
    pause_ns = min(PAUSE_MAX_NS, PAUSE_MIN_NS << min(first.retry.rounds, 10))
    left_ns = first.retry.since_ns + _longest_wait_ns(state, first) - state.now_ns
    pause_ns = min(pause_ns, max(PAUSE_MIN_NS, left_ns)) if left_ns > 0 else pause_ns
    for sequence in sequences:
        state.fire(sequence, Deferred(pause_ns))
    assert first.call.request in state.calls


def _end_if_waited_out(state: IngressState, sequence: OpenSequence) -> bool:
    """End the call if this sequence has waited for as long as it may; returns whether it did."""
    retry, model = sequence.retry, sequence.call.call.model
    waited_ns = state.now_ns - retry.since_ns
    over, why_none = waited_ns >= _longest_wait_ns(state, sequence), state.cluster.why_none_comes(model)
    kind = RefusalKind.CONTINUATION_FAILED
    if retry.suspect:
        detail = (
            "An engine died or fell silent when it had got this request. It is not tried again beside others, and "
            f"within {waited_ns / 1e9:.1f} s no instance of {model} was free for it alone."
        )
    elif sequence.owned:
        over = over or bool(why_none)
        detail = (
            f"The instance that decoded this request was lost ({retry.why}) and within {waited_ns / 1e9:.1f} s no "
            f"other one of {model} could go on with it{why_none and ', as '}{why_none}."
        )
    else:
        over = (over and not _is_late(state, sequence)) or bool(why_none) or not state.cluster.expects(model)
        full = retry.why == RefusalReason.FULL.value
        kind = RefusalKind.QUEUE_FULL if full else RefusalKind.NO_INSTANCE
        detail = "every instance's queue is full" if full else "no instance of it takes work now"
        detail = f"The model {model} cannot be served: {detail}{why_none and ', and '}{why_none}."
    if over:
        refuse_or_fail(state, sequence.call, kind, detail)
    return over


def _is_late(state: IngressState, sequence: OpenSequence) -> bool:
    """Whether an instance lives that could take it, and is only late, with its heartbeats or its answer."""
    model, needed = sequence.call.call.model, len(sequence.prompt) + sequence.sampling.room
    unanswered = sequence.retry.why in _UNANSWERED and state.cluster.usable(model) > 0
    return sequence.call.patience_ns is None and (unanswered or state.cluster.late(model, needed))


def _longest_wait_ns(state: IngressState, sequence: OpenSequence) -> int:
    configured_ns = state.times.continuation if sequence.retry.lost else state.times.wait
    patience_ns = sequence.call.patience_ns
    return configured_ns if patience_ns is None else min(patience_ns, configured_ns)


# Sequences that wait.


def arm_dispatch_timer(state: IngressState, at_ns: int) -> None:
    """Make the dispatch timer fire at that time or earlier."""
    if not state.dispatch_timer_ns or at_ns < state.dispatch_timer_ns:
        state.dispatch_timer_ns = at_ns
        state.emit(StartTimer(name=DISPATCH_TIMER, at_ns=at_ns))


def dispatch_waiting(state: IngressState, *, all_of_them: bool = False) -> None:
    """Dispatch what is due (or everything: an instance became usable)."""
    state.dispatch_timer_ns = 0
    for sequence in list(state.waiting.values()):
        if sequence.id not in state.waiting:  # its call was ended by an earlier one
            continue
        if all_of_them or sequence.retry.at_ns <= state.now_ns:
            dispatch(state, [sequence])
    if state.waiting:
        arm_dispatch_timer(state, min(s.retry.at_ns for s in state.waiting.values()))
