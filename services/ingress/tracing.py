"""Trace spans of a sampled call: ``ingress`` at the root; ``tag``, ``forecast``, ``dispatch``, ``continuation`` below.

A worker's queue, prefill and decode spans are children of the ``dispatch`` or ``continuation`` span that placed the
sequence, whose context travels in SubmitSequence's ``traceparent``.
"""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
from millrace.actor.effects import RecordSpan
from millrace.contracts.observers import CandidateForecast, RequestFinished
from millrace.telemetry.tracecontext import TraceContext, child, format_traceparent, parse_traceparent

from services.ingress.calls.messages import Call, CallKind
from services.ingress.calls.open_call import OpenCall
from services.ingress.lifecycle import DispatchChoice
from services.ingress.pending import PendingForecast, PendingTag
from services.ingress.sequence import EpochGrant, OpenSequence
from services.ingress.state import IngressState


def new_span(call: OpenCall, rng: Random) -> str:
    """Context of a new child of the call's root span; the call's own where it is not sampled."""
    if call.trace is None:
        return call.call.traceparent
    return format_traceparent(child(call.trace, rng))


def keep(call: OpenCall) -> None:
    """Record the trace from now on, though it was not sampled: what fails or moves is worth looking at."""
    if call.trace is None:
        context = parse_traceparent(call.call.traceparent)
        call.trace = msgspec.structs.replace(context, sampled=True) if context is not None else None


def _record(
    state: IngressState,
    call: OpenCall,
    name: str,
    context: str,
    start_ns: int,
    attributes: dict[str, Any],
    *,
    link: str = "",
    error: str = "",
) -> None:
    """Record a child of the call's root span that ends now; nothing where the trace is not sampled."""
    if call.trace is None:
        return
    state.emit(
        RecordSpan(
            name=name,
            traceparent=context,
            parent_span_id=call.trace.span_id,
            start_ns=start_ns,
            end_ns=state.now_ns,
            attributes=attributes,
            links=[link] if link else [],
            error=error,
        )
    )


def end_tag(state: IngressState, call: OpenCall, pending: PendingTag, result: str) -> None:
    """Record the question to the tagger."""
    attributes: dict[str, Any] = {"request": call.request, "result": result}
    if call.predicted is not None:
        attributes["expected_output_tokens"] = call.predicted
    _record(state, call, "tag", pending.span, pending.started_ns, attributes)


def end_forecast(
    state: IngressState, call: OpenCall, pending: PendingForecast, forecasts: list[CandidateForecast]
) -> None:
    """Record the question to predictors."""
    if call.trace is None:
        return
    answered = [f for f in forecasts if not f.note]
    attributes: dict[str, Any] = {
        "request": call.request,
        "asked": len(pending.asked),
        "answered": len(answered),
        "answers": ", ".join(f"{f.name}: {f.note or _forecast_text(f)}" for f in forecasts),
    }
    error = "" if answered else "no prediction"
    _record(state, call, "forecast", pending.span, pending.started_ns, attributes, error=error)


def _forecast_text(forecast: CandidateForecast) -> str:
    cached = f", {forecast.cached_tokens} tokens cached" if forecast.cached_tokens else ""
    return f"{forecast.e2e_ns / 1e6:.1f} ms, first token {forecast.ttft_ns / 1e6:.1f} ms{cached}"


def begin_placement(state: IngressState, sequence: OpenSequence, choice: DispatchChoice) -> None:
    """Open the sequence's dispatch or continuation span."""
    call, span, decision = sequence.call, sequence.span, choice.decision
    if sequence.owned:
        keep(call)
    earlier, span.context = span.context, new_span(call, state.rng)
    span.start_ns = state.now_ns
    if call.trace is None:
        return
    attributes: dict[str, Any] = {
        "request": call.request,
        "sequence": sequence.id,
        "epoch": sequence.epoch,
        "policy": choice.policy,
        "instance": decision.chosen or "",
        "reason": decision.reason,
        "scores": ", ".join(f"{s.name}={s.score:.3f}" for s in decision.scores[:4]),
        "output_tokens": len(sequence.log),
    }
    if call.predicted is not None:  # the tagger's estimate, or the length that the call asks for
        attributes["expected_output_tokens"] = call.predicted
    if choice.fallback:
        attributes["fallback"] = choice.fallback
    if choice.forecasts:
        attributes["forecasts"] = msgspec.json.encode(choice.forecasts).decode()  # `millrace explain` reads it
    if sequence.owned:
        attributes["cause"] = sequence.retry.why
        attributes["link"] = earlier
    span.attributes = attributes


def end_placement(state: IngressState, sequence: OpenSequence, error: str) -> None:
    """Record the span: the placement was accepted (no error), or failed. Does nothing after the first time."""
    call, span = sequence.call, sequence.span
    attributes, span.attributes = span.attributes, None
    if attributes is not None:
        earlier, name = attributes.pop("link", ""), "continuation" if "cause" in attributes else "dispatch"
        _record(state, call, name, span.context, span.start_ns, attributes, link=earlier, error=error)


def end_move(state: IngressState, sequence: OpenSequence, grant: EpochGrant, *, source: str, outcome: str) -> None:
    """Record a migration: a span since its epoch was granted, linked to the one before."""
    call = sequence.call
    earlier, sequence.span.context = sequence.span.context, grant.span
    attributes = {
        "request": call.request,
        "sequence": sequence.id,
        "epoch": grant.epoch,
        "migration": grant.migration,
        "source": source,
        "instance": grant.instance.name,
        "outcome": outcome,
        "output_tokens": len(sequence.log),
    }
    _record(state, call, "move", grant.span, grant.at_ns, attributes, link=earlier)


def _gen_ai(call: OpenCall) -> dict[str, Any]:
    """The same under OpenTelemetry's names for calls of models, which other tools read."""
    sampling = call.call.sampling
    return {
        "gen_ai.operation.name": "chat" if call.call.kind is CallKind.CHAT else "text_completion",
        "gen_ai.provider.name": "millrace",
        "gen_ai.request.model": call.call.model,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.usage.input_tokens": call.prompt_tokens,
        "gen_ai.usage.output_tokens": call.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": call.cached_tokens,
        "gen_ai.response.finish_reasons": [s.output.finish_reason for s in call.sequences],
    }


def end_call(state: IngressState, call: OpenCall, finished: RequestFinished) -> None:
    """Record the root span; that of an attempt is its cascade's to record, with its score."""
    if finished.outcome != "completed":
        keep(call)
    if call.trace is not None and not call.call.parent:
        more = {"instances": ", ".join(call.instances), **_gen_ai(call)}
        end_root(state, call.call, call.trace, finished, more)


def end_root(
    state: IngressState, call: Call, trace: TraceContext, finished: RequestFinished, more: dict[str, Any]
) -> None:
    """Record the root span of a client's call: its outcome, and more attributes."""
    first: list[tuple[str, int, dict[str, Any]]] = []
    if finished.ttft_ns is not None:
        first.append(("first_token", finished.arrival_ns + finished.ttft_ns, {}))
    shown = ("request", "model", "key", "outcome", "prompt_tokens", "cached_tokens", "continuations", "migrations")
    attributes: dict[str, Any] = {name: getattr(finished, name) for name in shown}
    attributes |= {
        "client_id": call.client_id,
        "output_tokens": sum(finished.output_tokens),
        "finish_reasons": ", ".join(finished.finish_reasons),
    }
    state.emit(
        RecordSpan(
            name="ingress",
            traceparent=format_traceparent(trace),
            parent_span_id=call.parent_span_id,
            start_ns=finished.arrival_ns,
            end_ns=state.now_ns,
            attributes=attributes | more,
            events=first,
            error="" if finished.outcome == "completed" else finished.detail,
        )
    )
