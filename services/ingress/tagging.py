"""Asking the tagger for a call's expected length. It never makes a request fail: no answer means unknown."""

from __future__ import annotations

from millrace.actor.effects import Effect, Request
from millrace.contracts.tagger import LengthTag, TagRequest

from services.ingress import tracing
from services.ingress.opening import expected_output
from services.ingress.placing import place_call
from services.ingress.state import IngressState, OpenCall, PendingTag

#: Failures in a row until the tagger is left alone for a while.
TAG_FAILURES_MAX = 3
#: Characters of the prompt that a tagger is shown.
PROMPT_HEAD_MAX = 2_048


def wants_tag(state: IngressState, call: OpenCall) -> bool:
    """Whether to ask: not where the request states its length, the policy needs none, or nobody answered lately."""
    mode = state.config.tagging.mode
    if mode == "never" or call.expected_output_tokens is not None or not state.connected:
        return False
    if state.now_ns < state.tag_from_ns:
        state.metrics.tags.add("paused")
        return False
    return mode == "always" or state.policy_of(call)[0].needs_length


def ask_tag(state: IngressState, call: OpenCall, out: list[Effect]) -> None:
    """Asks; the call is placed when the answer, or none, has come."""
    span = tracing.new_span(call, state.rng)
    call.tagging = state.correlation("tag", PendingTag(call, state.now_ns, span))
    out.append(
        Request(
            subject=state.subjects.tag(call.call.model),
            body=TagRequest(
                request=call.request,
                model=call.call.model,
                prompt_tokens=call.prompt_tokens,
                max_tokens=call.call.sampling.max_tokens,
                temperature=call.call.sampling.temperature,
                key=call.call.key,
                prompt=call.call.prompt_head[:PROMPT_HEAD_MAX],
            ),
            correlation=call.tagging,
            timeout_ns=state.times.tag_timeout,
            request=call.request,
            traceparent=span,
        )
    )


def tagged(state: IngressState, pending: PendingTag, tag: LengthTag | None, out: list[Effect]) -> None:
    """The answer is there, or will not come: the call is placed."""
    call: OpenCall = pending.call
    call.tagging = ""
    result = "unanswered"
    if tag is None:
        state.tag_failures += 1
        if state.tag_failures >= TAG_FAILURES_MAX:
            state.tag_from_ns = state.now_ns + state.times.tag_pause
    else:
        state.tag_failures = 0
        call.predicted, call.expected_output_tokens = expected_output(call, tag)
        result = "unknown" if call.predicted is None else "known"
    state.metrics.tags.add(result)
    tracing.end_tag(call, pending, result, state.now_ns, out)
    place_call(state, call, out)
