"""Shadow runs: a sampled share of a cascade's requests is answered by every tier, without anybody waiting for it.

What clients get is censored: a tier sees only what the ones before it could not answer, and of rejected answers only
some are generated to their end. A shadow run asks the tiers that gave no whole answer, one after another, after the
client has got its own. The result, ShadowFinished, goes to planners: scores of all tiers on a fair sample, and whether
each answer is the last tier's.

| event | consequence |
|---|---|
| a cascade's call completes | with probability ``shadow_share`` a shadow run begins, unless SHADOWS_MAX are open |
| its next tier has an idle instance | one sequence of priority 1 is dispatched there |
| that instance gets a queue | the sequence is cancelled, and the run given up |
| no instance is idle for ``shadow_wait_s``, an attempt fails, ingress stops | the run is given up |
| every tier has answered | ShadowFinished |

Invariants: one sequence at a time per run; runs are not in admission, charged to nobody, and end before ingress does.
"""

from __future__ import annotations

import msgspec
from millrace.actor.effects import Publish
from millrace.contracts.observers import ShadowAnswer, ShadowFinished

from services.ingress.calls.admission import open_call, too_long
from services.ingress.calls.completion import abandon
from services.ingress.calls.limits import Refusal
from services.ingress.calls.messages import Call, CascadeOptions, ChoiceDelta
from services.ingress.calls.open_call import OpenCall
from services.ingress.cascade.confidence_score import score_by_confidence
from services.ingress.cascade.open_cascade import Attempt, OpenCascade, ShadowRun
from services.ingress.cluster.instances import KnownInstance
from services.ingress.dispatch.dispatcher import dispatch_new
from services.ingress.state import IngressState
from services.ingress.times import SECOND_NS
from services.ingress.tokens.detokenizer import TextStream

#: Runs that are open at once in one ingress, at one sequence each.
SHADOWS_MAX = 4

#: Sequences of lower priority number come first in engines that schedule by priority; clients have 0.
PRIORITY = 1

#: An instance is idle for shadows where its running batch has at most this share of its places taken, and no queue.
IDLE_SHARE = 0.25


class ShadowListener:
    """A run's ear at its attempt; the end is handled after the message that caused it."""

    is_client = False

    def __init__(self, state: IngressState, run: ShadowRun) -> None:
        self._state = state
        self._run = run

    def on_accepted(self, call: OpenCall) -> None:
        """Nothing: nobody waits."""

    def on_tokens(self, call: OpenCall) -> None:
        """Nothing: it runs to its end."""

    def on_deltas(self, call: OpenCall, deltas: list[ChoiceDelta]) -> None:
        """Nothing: the text is made of the log."""

    def on_completed(self, call: OpenCall) -> None:
        self._ended(complete=True)

    def on_failed(self, call: OpenCall, refusal: Refusal) -> None:
        self._ended(complete=False)

    def _ended(self, *, complete: bool) -> None:
        self._run.ended = complete
        self._state.shadows_due.append(self._run)


def sample(state: IngressState, parent: OpenCascade) -> None:
    """Begin a shadow run of a call that was answered, if it is drawn."""
    config, call = parent.served.config, parent.call
    if not config.shadow_share or state.stopping or parent.choices > 1 or call.cascade.max_tier is not None:
        return
    if not any(attempt.outcome == "delivered" for attempt in parent.attempts):
        return
    if state.rng.random() >= config.shadow_share or len(parent.served.plan.tiers) < 2:
        return
    if len(state.shadows) >= SHADOWS_MAX:
        state.metrics.shadows.add(call.model, "too_many")
        return
    run = state.shadows[call.request] = ShadowRun(parent, state.now_ns)
    for attempt in parent.attempts:
        if attempt.outcome in ("delivered", "rejected"):
            run.answers[attempt.model] = attempt
    _go_on(state, run)


def settle_shadows(state: IngressState) -> None:
    """Handle attempts that ended in this message."""
    while state.shadows_due:
        run = state.shadows_due.pop()
        if state.shadows.get(run.parent.request) is not run:
            continue
        attempt, run.open = run.open, None
        if attempt is None or not run.ended:
            give_up(state, run, "failed")
            continue
        score_by_confidence(state, attempt)
        run.answers[attempt.model] = attempt
        run.since_ns = state.now_ns
        _go_on(state, run)


def look_at_shadows(state: IngressState) -> None:
    """With each tick: go on with what waits for an idle instance, and end what has come into somebody's way."""
    for run in list(state.shadows.values()):
        if state.stopping:
            give_up(state, run, "stopped")
        elif run.open is None:
            _go_on(state, run)
        elif _in_the_way(run.open):
            give_up(state, run, "busy")


def give_up(state: IngressState, run: ShadowRun, why: str) -> None:
    """End a run without a result."""
    del state.shadows[run.parent.request]
    state.metrics.shadows.add(run.parent.call.model, why)
    attempt, run.open = run.open, None
    if attempt is not None and attempt.call is not None and attempt.request in state.calls:
        abandon(state, attempt.call, "shadow_" + why)


def _go_on(state: IngressState, run: ShadowRun) -> None:
    """Ask the next tier, publish the result, or wait for an idle instance."""
    parent = run.parent
    missing = [tier.model for tier in parent.served.plan.tiers if tier.model not in run.answers]
    if not missing:
        _finish(state, run)
    elif missing[0] not in parent.members:
        give_up(state, run, "unable")
    elif _idle(state, missing[0]):
        _start(state, run, missing[0])
    elif state.now_ns - run.since_ns >= parent.served.config.shadow_wait_s * SECOND_NS:
        give_up(state, run, "busy")


def _start(state: IngressState, run: ShadowRun, model: str) -> None:
    parent, served = run.parent, run.parent.served
    tier = served.position(model)
    assert tier is not None
    run.asked += 1
    request = f"{parent.request}~s{run.asked}"
    attempt = Attempt(request, tier=tier, model=model, epoch=served.plan.epoch, now_ns=state.now_ns)
    call = _child(run, request, model)
    if too_long(state, call) is not None:
        give_up(state, run, "unable")
        return
    run.open, run.ended = attempt, None
    attempt.call = open_call(state, call, ShadowListener(state, run))
    attempt.call.patience_ns = SECOND_NS
    dispatch_new(state, attempt.call)


def _child(run: ShadowRun, request: str, model: str) -> Call:
    parent = run.parent
    member = parent.members[model]
    return msgspec.structs.replace(
        parent.call,
        request=request,
        parent=parent.request,
        model=model,
        prompts=member.prompts,
        prompt_head=member.prompt_head,
        sampling=member.sampling,
        stream=False,
        key="",
        traceparent="",
        timeout_ns=int(parent.served.config.shadow_timeout_s * SECOND_NS),
        judged=True,
        priority=PRIORITY,
        members=[],
        cascade=CascadeOptions(),
    )


def _idle(state: IngressState, model: str) -> bool:
    """Whether every instance of the model that takes work has room: it is not known yet which one is chosen."""
    usable = [i for stage in state.cluster.stages(model, 0) for i in stage.instances if i.usable]
    return bool(usable) and all(map(_has_room, usable))


def _has_room(instance: KnownInstance) -> bool:
    view = instance.view
    places = max(1, int(IDLE_SHARE * view.sequences_max)) if view.sequences_max else 1
    return not view.waiting and view.running + view.in_flight_sequences < places


def _in_the_way(attempt: Attempt) -> bool:
    """Whether others wait at the instance that decodes it."""
    assert attempt.call is not None
    return any(s.instance is not None and s.instance.view.waiting > 0 for s in attempt.call.sequences)


def _finish(state: IngressState, run: ShadowRun) -> None:
    """Publish what every tier answered."""
    parent = run.parent
    plan, name = parent.served.plan, parent.call.model
    del state.shadows[parent.request]
    state.metrics.shadows.add(name, "finished")
    reference = _text(state, parent, run.answers[plan.tiers[-1].model])
    answers = [_answer(state, parent, run.answers[tier.model], reference) for tier in plan.tiers]
    for answer in answers:
        state.metrics.shadow_answers.add(name, answer.model, "yes" if answer.agrees else "no")
        state.metrics.shadow_scores.add(name, answer.model, by=round(answer.score or 0.0))
    body = ShadowFinished(
        request=parent.request,
        cascade=name,
        epoch=plan.epoch,
        ingress=state.name,
        arrival_ns=parent.arrival_ns,
        answers=answers,
    )
    state.emit(Publish(subject=state.subjects.shadow(name), body=body, request=parent.request))


def _answer(state: IngressState, parent: OpenCascade, attempt: Attempt, reference: str) -> ShadowAnswer:
    assert attempt.call is not None
    score_by_confidence(state, attempt)  # uniformly: a judge may have scored some of them
    (sequence,) = attempt.call.sequences
    usage = attempt.usage()
    known = [] if sequence.evidence is None else sequence.evidence.logprobs
    return ShadowAnswer(
        model=attempt.model,
        score=attempt.score,
        agrees=_text(state, parent, attempt) == reference,
        prompt_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        logprobs=[] if attempt.score is None else [round(1000 * value) for value in known],
    )


def _text(state: IngressState, parent: OpenCascade, attempt: Attempt) -> str:
    """The answer without white space around it, made of its tokens: models need not share a tokenizer."""
    assert attempt.call is not None
    (sequence,) = attempt.call.sequences
    call = parent.call
    stream = TextStream(state.models[attempt.model].vocabulary, call.stop, call.include_stop, call.skip_special_tokens)
    output = sequence.output
    stop_token = output.finish_reason == "stop" and not isinstance(output.stop_reason, str)
    return stream.push(sequence.log, True, stop_token).text.strip()
