"""Tag client: asks the tagger for a call's expected length. It never makes a request fail: no answer means unknown."""

from __future__ import annotations

from millrace.actor.effects import Log, Request
from millrace.contracts.tagger import LengthTag, TagRequest
from millrace.contracts.worker import StructuredOutput

from services.ingress import tracing
from services.ingress.calls.admission import expected_output
from services.ingress.calls.messages import Call
from services.ingress.calls.open_call import OpenCall
from services.ingress.pending import PendingTag
from services.ingress.state import IngressState
from services.ingress.times import TAG_PAUSE_NS

#: Characters of the prompt that the tagger gets.
PROMPT_HEAD_MAX = 2_048


def wants_tag(state: IngressState, call: OpenCall) -> bool:
    """Whether to ask: not where the request states its length, the policy needs none, or nobody answered lately."""
    mode = state.config.tagging.mode
    if mode == "never" or call.expected_output_tokens is not None or not state.connected:
        return False
    if state.now_ns < state.tagger.from_ns:
        state.metrics.tags.add("paused")
        return False
    return mode == "always" or state.policy.needs_length


def ask_tag(state: IngressState, call: OpenCall) -> None:
    """Ask; the call is dispatched when the answer, or none, has come."""
    span = tracing.new_span(call, state.rng)
    call.tagging = state.correlation("tag", PendingTag(call, state.now_ns, span))
    state.emit(
        Request(
            subject=state.subjects.tag(call.call.model),
            body=tag_request(call.call, call.prompt_tokens),
            correlation=call.tagging,
            timeout_ns=state.times.tag_timeout,
            request=call.request,
            traceparent=span,
        )
    )


def tag_request(call: Call, prompt_tokens: int) -> TagRequest:
    """The question: features of a call from which the length of its output may be predicted."""
    sampling = call.sampling
    return TagRequest(
        request=call.request,
        model=call.model,
        prompt_tokens=prompt_tokens,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        key=call.key,
        prompt=call.prompt_head[:PROMPT_HEAD_MAX],
        prompts=len(call.prompts),
        n=call.n,
        min_tokens=sampling.min_tokens,
        top_p=sampling.top_p,
        penalties=sampling.presence_penalty + sampling.frequency_penalty + sampling.repetition_penalty - 1.0,
        stops=len(call.stop) + len(sampling.stop_token_ids),
        structured=_kind(sampling.structured),
    )


def _kind(structured: StructuredOutput | None) -> str:
    """Name of the constraint's one field that is set."""
    if structured is None:
        return ""
    return next((name for name in structured.__struct_fields__ if getattr(structured, name)), "")


def take_tag(state: IngressState, pending: PendingTag, tag: LengthTag | None) -> None:
    """Keep the expected length; None where no answer came."""
    call = pending.call
    call.tagging = ""
    result = "unanswered"
    _update_health(state, tag is not None, call.call.model)
    if tag is not None:
        call.predicted, call.expected_output_tokens = expected_output(call, tag)
        result = "unknown" if call.predicted is None else "known"
    state.metrics.tags.add(result)
    tracing.end_tag(state, call, pending, result)


def _update_health(state: IngressState, answered: bool, model: str) -> None:
    """Count failures, pause after some, and log once when tags go missing and once when they are back."""
    health = state.tagger
    event = health.note(answered=answered, useful=answered, now_ns=state.now_ns, pause_ns=TAG_PAUSE_NS)
    if event:
        level = "warning" if event == "missing" else "info"
        state.emit(Log(level=level, event=f"tags_{event}", fields={"model": model}))
