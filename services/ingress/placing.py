"""Placing sequences: a policy chooses, a worker is asked, its answer moves the sequence on or back into the queue.

A sequence that nobody has is in ``state.waiting`` or submitted; each submission has an epoch of its own, so that an
answer or token of an earlier one can always be told from the present.
"""

from __future__ import annotations

from millrace.actor.effects import Effect, Publish, Request, StartTimer
from millrace.contracts.local import RequestFailure
from millrace.contracts.observers import CandidateScore, DecisionMade
from millrace.contracts.worker import RefusalReason, SequenceRefused, SubmitSequence
from millrace.policies.dispatch import Decision, DispatchPolicy, DispatchView

from services.ingress import tracing
from services.ingress.calls import AcceptCall, RefusalKind
from services.ingress.delivering import deliver_held
from services.ingress.endings import cancel, detach, refuse_or_fail
from services.ingress.state import (
    MILLISECOND_NS,
    SECOND_NS,
    IngressState,
    OpenCall,
    OpenSequence,
    PendingSubmit,
    Phase,
)

#: Timer of the next sequence that is to be tried again.
PLACE_TIMER = "place"
#: Pause after the first round without an instance; doubles up to the next. Losses are known within 1.5 s.
PAUSE_MIN_NS = 50 * MILLISECOND_NS
PAUSE_MAX_NS = 1 * SECOND_NS
#: Scores of filtered instances told in a decision besides the policy's own.
FILTERED_MAX = 8

_PERMANENT = {RefusalReason.TOO_LONG: RefusalKind.TOO_LONG, RefusalReason.INVALID: RefusalKind.INVALID}


def place_call(state: IngressState, call: OpenCall, out: list[Effect]) -> None:
    """Places a new call: the choices of one prompt together, as they share its prefix."""
    n = call.call.n
    for begin in range(0, len(call.sequences), n):
        place(state, call.sequences[begin : begin + n], out)
        if call.request not in state.calls:
            return


def place(state: IngressState, sequences: list[OpenSequence], out: list[Effect]) -> None:
    """Asks one instance to take sequences of one call, or lets them wait for one."""
    first = sequences[0]
    call = first.call
    for sequence in sequences:
        state.waiting.pop(sequence.id, None)
    if not state.connected:
        wait(state, sequences, out)
        return
    if first.tries >= state.config.dispatch.tries_max:
        wait(state, sequences, out)
        return
    policy, decision = choose(state, first, len(sequences))
    call.policy = policy.name
    if decision.chosen is None:
        if not first.rounds:
            _publish_decision(state, sequences, policy.name, decision, out)
        wait(state, sequences, out)
        return
    for sequence in sequences:
        sequence.epoch += 1
        _submit(state, sequence, decision, policy.name, out)
    _publish_decision(state, sequences, policy.name, decision, out)
    state.metrics.dispatches.add(policy.name, decision.chosen, by=len(sequences))


def choose(state: IngressState, sequence: OpenSequence, count: int) -> tuple[DispatchPolicy, Decision]:
    """Asks the policy, stage after stage, until one has a candidate.

    Instances that failed this sequence are left out; after a pause they count again when nothing else is there,
    and at once when they are a new incarnation.
    """
    call = sequence.call
    policy, parameters = state.policy_of(call)
    length = len(sequence.prompt) + len(sequence.log)
    filtered: list[CandidateScore] = []
    lengths = state.cluster.lengths(call.call.model)
    needed = len(sequence.prompt) + sequence.tokens_max
    too_long_for_some = lengths is not None and needed > lengths[0]
    stages = state.cluster.stages(call.call.model, length)
    for lenient in (False, True) if sequence.excluded else (False,):
        for stage in stages:
            candidates = stage.candidates()
            if too_long_for_some:
                candidates = tuple(c for c in candidates if _long_enough(state, c.name, needed))
            if sequence.excluded:
                candidates = tuple(c for c in candidates if _allowed(state, sequence, c.name, lenient))
            if not candidates:
                continue
            view = DispatchView(
                model=call.call.model,
                sequences=count,
                length_tokens=length,
                candidates=candidates,
                expected_output_tokens=call.predicted,
            )
            key = (policy.name, call.call.model)
            before = state.policy_states.get(key, policy.initial_state)
            decision, state.policy_states[key] = policy.decide(view, parameters, before, state.now_ns, state.rng)
            return policy, decision
    for stage in stages:
        filtered.extend(stage.filtered())
    filtered.extend(CandidateScore(name, 0.0, "failed this request") for name in sequence.excluded)
    return policy, Decision(None, "no instance can take it", filtered[:FILTERED_MAX])


def _long_enough(state: IngressState, name: str, length_tokens: int) -> bool:
    record = state.cluster.instances[name].record
    return record is None or record.max_model_len >= length_tokens


def _allowed(state: IngressState, sequence: OpenSequence, name: str, lenient: bool) -> bool:
    failed = sequence.excluded.get(name)
    if failed is None:
        return True
    return lenient and (sequence.rounds > 0 or state.cluster.instances[name].incarnation != failed)


def _submit(state: IngressState, sequence: OpenSequence, decision: Decision, policy: str, out: list[Effect]) -> None:
    assert decision.chosen is not None
    call = sequence.call
    instance = state.cluster.instances[decision.chosen]
    sequence.tries += 1
    sequence.phase = Phase.SUBMITTED
    sequence.instance = instance
    sequence.incarnation = instance.incarnation
    sequence.fresh = True
    sequence.span_attributes = tracing.begin_placement(sequence, decision, policy, state.now_ns, state.rng)
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


def _publish_decision(
    state: IngressState, sequences: list[OpenSequence], policy: str, decision: Decision, out: list[Effect]
) -> None:
    first = sequences[0]
    call = first.call
    out.append(
        Publish(
            subject=state.subjects.decision(call.call.model),
            body=DecisionMade(
                request=call.request,
                sequences=[s.id for s in sequences],
                epoch=first.epoch,
                kind="continuation" if first.owned else "dispatch",
                policy=policy,
                model=call.call.model,
                chosen=decision.chosen or "",
                reason=f"{first.why}; {decision.reason}" if first.why else decision.reason,
                scores=decision.scores,
                at_ns=state.now_ns,
            ),
            request=call.request,
            traceparent=call.call.traceparent,
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
        sequence.phase = Phase.WAITING
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
    sequence.phase = Phase.RUNNING
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
    sequence.phase = Phase.WAITING
    if not sequence.owned or not sequence.why:
        sequence.why = why
