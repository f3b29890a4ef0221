"""Reactions to the events of a cascade's call, and at the end the table that says which event leads where.

Events of attempts are collected while a message is handled and settled after it (``settle``): an attempt may then be
cancelled without disturbing the token ingest that noticed the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from millrace.actor.effects import Log
from millrace.actor.transitions import Transition, TransitionTable
from millrace.contracts.cascade import CascadePlan

from services.ingress.calls.completion import abandon
from services.ingress.calls.limits import Refusal
from services.ingress.calls.messages import Call, CallAbandoned, RefusalKind
from services.ingress.cascade import ending
from services.ingress.cascade.attempts import look_again, start_again, start_attempt
from services.ingress.cascade.entry import EntryDecision, enter
from services.ingress.cascade.escalation import (
    acceptance,
    commits_early,
    is_last,
    may_follow,
    next_tier,
    out_of_reach,
    planned_threshold,
    planned_tiers,
    resumable,
    score_by_confidence,
    threshold_now,
    usable_tiers,
)
from services.ingress.cascade.judge_client import ask_judge, take_answer, wants_judge
from services.ingress.cascade.lifecycle import (
    AnswerCompleted,
    AnswerScored,
    AttemptFailed,
    CascadeEvent,
    CascadePhase,
    ClientGone,
    DeliveryReason,
    JudgementGivenUp,
    ScoreOutOfReach,
    TextReady,
)
from services.ingress.cascade.open_cascade import OpenCascade
from services.ingress.pending import PendingJudge
from services.ingress.state import IngressState


def open_cascade(state: IngressState, call: Call) -> None:
    """Open an admitted call of a cascade and start its first attempt."""
    served = state.cascades.get(call.model)
    assert served is not None
    parent = OpenCascade(call, served, state.now_ns, call.timeout_ns or state.times.call_timeout)
    state.parents[call.request] = parent
    usable = usable_tiers(state, parent) or [
        tier for tier in planned_tiers(parent) if state.cluster.expects(served.plan.tiers[tier].model)
    ]
    if not usable:
        detail = f"The model {call.model} cannot be served: no tier of it has an instance now."
        parent.refusal = Refusal(RefusalKind.NO_INSTANCE, detail, "", 1.0)
        ending.refuse(state, parent)
        return
    decision = enter(served.config.entry, usable, given=call.cascade.entry_tier, learnt=_learnt(state, parent, usable))
    parent.entry, parent.last = decision.reason, decision.last
    start_attempt(state, parent, decision.tier)


def _learnt(state: IngressState, parent: OpenCascade, usable: Sequence[int]) -> EntryDecision | None:
    learnt, call = state.entries.get(parent.call.model), parent.call
    if learnt is None:
        return None
    tiers = [tier.model for tier in parent.served.plan.tiers]
    return learnt.choose(tiers, usable, call.prompt_head, max(map(len, call.prompts)))


def take_cascade_plan(state: IngressState, key: str, plan: CascadePlan | None) -> None:
    """A published plan is new, changed or gone."""
    fault = state.cascades.take(key, plan)
    if fault:
        state.emit(Log(level="error", event="cascade_refused", fields={"key": key, "reason": fault}))
    elif plan is not None:
        for parent in state.parents.values():
            if parent.call.model == plan.cascade:
                look_again(state, parent)


# Events.


def abandon_call(state: IngressState, body: CallAbandoned) -> None:
    """The client of a call left, of a cascade's or of a model's; the call may have ended meanwhile."""
    call, parent = state.calls.get(body.request), state.parents.get(body.request)
    if call is not None:
        abandon(state, call, body.reason)
    elif parent is not None:
        fire(state, parent, ClientGone(body.reason))


def settle(state: IngressState) -> None:
    """Handle what attempts did in this message, and send what is due to clients."""
    while state.unsettled:
        _, parent = state.unsettled.popitem()
        _look_at_progress(state, parent)
        while parent.events:
            attempt, event = parent.events.popleft()
            if parent.phase is not CascadePhase.ENDED and attempt is parent.attempt and not attempt.outcome:
                fire(state, parent, event)
        if parent.phase is CascadePhase.STREAMING:
            ending.deliver_deltas(state, parent)


def _look_at_progress(state: IngressState, parent: OpenCascade) -> None:
    """Commit or reject an attempt that goes on, by its tokens so far."""
    progressed, parent.progressed = parent.progressed, False
    attempt = parent.attempt
    if not progressed or parent.phase is not CascadePhase.ATTEMPTING:
        return
    if attempt.streams:
        if any(delta.text or delta.finish_reason for delta in attempt.deltas):
            fire(state, parent, TextReady(attempt.reason))
        return
    if attempt.request not in state.calls:
        return  # it is complete: its score decides
    if commits_early(state, parent):
        fire(state, parent, TextReady(DeliveryReason.EARLY_COMMIT))
    elif out_of_reach(state, attempt) and next_tier(state, parent)[0] is not None:
        fire(state, parent, ScoreOutOfReach())


def take_judgement(state: IngressState, pending: PendingJudge, answer: Any) -> None:
    """Handle the answer of a judge, or the lack of one (None)."""
    take_answer(state, pending, answer)
    _scored(state, pending.cascade)


def interrupt(state: IngressState) -> None:
    """This ingress stops: calls whose answer is being judged deliver it; open attempts are failed after this."""
    for parent in list(state.parents.values()):
        if parent.phase is CascadePhase.JUDGING:
            fire(state, parent, JudgementGivenUp())


def fire(state: IngressState, parent: OpenCascade, event: CascadeEvent) -> None:
    """Advance a call by an event and carry out the reaction.

    Raises:
        TransitionRefused: the event cannot happen in its state.
    """
    attempt = parent.attempt
    if isinstance(event, AnswerCompleted):
        attempt.outcome, attempt.ended_ns = "complete", state.now_ns
    elif isinstance(event, AttemptFailed):
        attempt.outcome, attempt.ended_ns, attempt.detail = "failed", state.now_ns, event.refusal.detail
        parent.refusal = event.refusal
    row = CASCADE_TRANSITIONS.take(
        parent.phase, type(event), lambda guard: guard(state, parent, event), who=parent.request
    )
    parent.phase = row.target
    row.reaction(state, parent, event)


# Reactions.


def judge(state: IngressState, parent: OpenCascade, event: AnswerCompleted) -> None:
    """Score the answer: here, or by its judge where the score can change anything."""
    score_by_confidence(state, parent.attempt)
    open_choice = next_tier(state, parent)[0] is not None or len(parent.attempts) > 1
    if not (open_choice and planned_threshold(parent) > 0 and wants_judge(state, parent)):
        _scored(state, parent)
    else:
        ask_judge(state, parent)


def _scored(state: IngressState, parent: OpenCascade) -> None:
    _compare(state, parent)
    fire(state, parent, AnswerScored())


def _compare(state: IngressState, parent: OpenCascade) -> None:
    """Note the threshold in force for the attempt's score, and the score for the next one's."""
    attempt = parent.attempt
    attempt.threshold, attempt.epoch = threshold_now(state, parent), parent.served.plan.epoch
    parent.served.budget(attempt.model).note(attempt.score, state.now_ns)


def escalate(state: IngressState, parent: OpenCascade, event: AnswerScored | AttemptFailed | ScoreOutOfReach) -> None:
    """Start the next tier's attempt."""
    position, _ = next_tier(state, parent)
    assert position is not None
    attempt = parent.attempt
    if attempt.outcome == "complete":
        attempt.outcome = "rejected"
    why = "score" if attempt.outcome == "rejected" else attempt.outcome
    state.metrics.escalations.add(parent.call.model, why)
    ending.record_attempt(state, parent, attempt)
    start_attempt(state, parent, position)


def run_again(state: IngressState, parent: OpenCascade, event: AttemptFailed) -> None:
    """No later tier answers, and no answer is complete: run the one that was rejected early to its end."""
    ending.record_attempt(state, parent, parent.attempt)
    start_again(state, parent)


def reject_early(state: IngressState, parent: OpenCascade, event: ScoreOutOfReach) -> None:
    """Cancel an attempt that cannot reach its threshold, and escalate."""
    attempt = parent.attempt
    assert attempt.call is not None
    score_by_confidence(state, attempt)
    _compare(state, parent)
    abandon(state, attempt.call, "rejected_early")
    attempt.outcome, attempt.ended_ns = "rejected_early", state.now_ns
    attempt.deltas = []
    escalate(state, parent, event)


def commit(state: IngressState, parent: OpenCascade, event: TextReady) -> None:
    """It is settled who answers: tokens go to the client from now on. No other tier can stand in, so that the attempt
    waits for an instance for as long as a plain call.
    """
    attempt = parent.attempt
    attempt.reason = event.reason
    if attempt.call is not None:
        attempt.call.patience_ns = None
    ending.accept(state, parent, attempt)


def deliver(state: IngressState, parent: OpenCascade, event: AnswerCompleted | AnswerScored) -> None:
    """Deliver the current attempt's answer whole."""
    attempt = parent.attempt
    if isinstance(event, AnswerCompleted):
        score_by_confidence(state, attempt)
        attempt.reason = DeliveryReason.TIER_UNAVAILABLE if attempt.again else DeliveryReason.LAST_TIER
    else:
        attempt.reason = acceptance(parent) or DeliveryReason.LAST_TIER
    ending.accept(state, parent, attempt)
    ending.complete(state, parent, attempt)


def deliver_best(state: IngressState, parent: OpenCascade, event: Any) -> None:
    """Deliver the best answer so far: nothing better can come."""
    best = parent.best()
    assert best is not None
    if parent.attempt.outcome == "complete" and parent.attempt is not best:
        parent.attempt.outcome = "rejected"
    best.reason = _why_best(state, parent, event)
    ending.accept(state, parent, best)
    ending.complete(state, parent, best)


def _why_best(state: IngressState, parent: OpenCascade, event: CascadeEvent) -> DeliveryReason:
    if isinstance(event, AttemptFailed):
        late = event.refusal.kind in (RefusalKind.TIMEOUT, RefusalKind.STOPPING)
        return DeliveryReason.INTERRUPTED if late else DeliveryReason.TIER_UNAVAILABLE
    if not isinstance(event, AnswerScored):
        return DeliveryReason.INTERRUPTED
    return next_tier(state, parent)[1]


def complete(state: IngressState, parent: OpenCascade, event: AnswerCompleted) -> None:
    """The attempt that streams has ended."""
    score_by_confidence(state, parent.attempt)
    ending.complete(state, parent, parent.attempt)


def fail(state: IngressState, parent: OpenCascade, event: AttemptFailed) -> None:
    """No attempt can answer, or the one that streams broke off."""
    ending.refuse(state, parent)


def leave(state: IngressState, parent: OpenCascade, event: ClientGone) -> None:
    """The client is gone: the attempt goes with it."""
    attempt = parent.attempt
    if attempt.call is not None and attempt.request in state.calls:
        abandon(state, attempt.call, event.reason)
        attempt.outcome, attempt.ended_ns = "cancelled", state.now_ns
    ending.abandon(state, parent, event.reason)


# Guards.


def ends_the_plan(state: IngressState, parent: OpenCascade, event: CascadeEvent) -> bool:
    """No tier of the plan may follow."""
    return is_last(parent)


def good_enough(state: IngressState, parent: OpenCascade, event: CascadeEvent) -> bool:
    """The score reaches the threshold in force."""
    return acceptance(parent) is not None


def may_escalate(state: IngressState, parent: OpenCascade, event: CascadeEvent) -> bool:
    """A further tier can answer in time."""
    open_way = not isinstance(event, AttemptFailed) or may_follow(event.refusal)
    return open_way and next_tier(state, parent)[0] is not None


def may_resume(state: IngressState, parent: OpenCascade, event: AttemptFailed) -> bool:
    """A tier that was rejected early can answer after all."""
    return may_follow(event.refusal) and resumable(state, parent) is not None


def has_answer(state: IngressState, parent: OpenCascade, event: CascadeEvent) -> bool:
    """An attempt is complete."""
    return parent.best() is not None


#: Both take (state, parent, event); the event is of the type that the row names.
Guard = Callable[[IngressState, OpenCascade, Any], bool]
Reaction = Callable[[IngressState, OpenCascade, Any], None]

_S = CascadePhase

#: Life cycle of a cascade's call.
CASCADE_TRANSITIONS = TransitionTable[CascadePhase, type[CascadeEvent], Guard, Reaction](
    Transition(_S.ATTEMPTING, AnswerCompleted, _S.ENDED, deliver, guard=ends_the_plan),
    Transition(_S.ATTEMPTING, AnswerCompleted, _S.JUDGING, judge),
    Transition(_S.ATTEMPTING, AttemptFailed, _S.ATTEMPTING, escalate, guard=may_escalate),
    Transition(_S.ATTEMPTING, AttemptFailed, _S.ENDED, deliver_best, guard=has_answer),
    Transition(_S.ATTEMPTING, AttemptFailed, _S.ATTEMPTING, run_again, guard=may_resume),
    Transition(_S.ATTEMPTING, AttemptFailed, _S.ENDED, fail),
    Transition(_S.ATTEMPTING, ScoreOutOfReach, _S.ATTEMPTING, reject_early),
    Transition(_S.ATTEMPTING, TextReady, _S.STREAMING, commit),
    Transition(_S.ATTEMPTING, ClientGone, _S.ENDED, leave),
    #
    Transition(_S.JUDGING, AnswerScored, _S.ENDED, deliver, guard=good_enough),
    Transition(_S.JUDGING, AnswerScored, _S.ENDED, deliver, guard=ends_the_plan),
    Transition(_S.JUDGING, AnswerScored, _S.ATTEMPTING, escalate, guard=may_escalate),
    Transition(_S.JUDGING, AnswerScored, _S.ENDED, deliver_best),
    Transition(_S.JUDGING, JudgementGivenUp, _S.ENDED, deliver_best),
    Transition(_S.JUDGING, ClientGone, _S.ENDED, leave),
    #
    Transition(_S.STREAMING, AnswerCompleted, _S.ENDED, complete),
    Transition(_S.STREAMING, AttemptFailed, _S.ENDED, fail),
    Transition(_S.STREAMING, ClientGone, _S.ENDED, leave),
)
